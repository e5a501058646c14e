"""The demo of the example: what it deploys is killed around, and must go on answering."""
