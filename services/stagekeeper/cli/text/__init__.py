"""Text for people and JSON for programs, made from messages. Nothing here asks or decides."""
