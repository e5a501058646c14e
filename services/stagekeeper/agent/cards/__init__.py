"""The cards of a host: what there is, how it is read, who uses it, and what may still be used."""
