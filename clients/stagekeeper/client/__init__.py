"""The client SDK: deploy, watch and call, with or without the supervisor."""
