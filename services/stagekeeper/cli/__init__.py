"""The command line. It turns flags and files into calls, and answers into text."""
