"""What both ends of a call share: the payload codec, failures and error details."""
