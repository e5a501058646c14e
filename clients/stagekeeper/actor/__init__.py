"""Actors and their meshes: endpoints, supervision and hosts."""
