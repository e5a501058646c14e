"""Deployments that the end-to-end tests use, as the dicts that a YAML file would hold."""

from __future__ import annotations

from typing import Any

Spec = dict[str, Any]


def echo(name: str = "echo", *, replicas: int = 1, **stage: Any) -> Spec:
    """One stage that answers with what it got."""
    return {
        "name": name,
        "replicas": replicas,
        "model": {"name": "Echo", "version": "1", "abilities": ["chat", "audio"]},
        "stages": [{"name": "echo", "entrypoint": "sample_stages:Echo", **stage}],
    }


def chain(name: str = "chain", *, replicas: int = 1) -> Spec:
    """Three stages as Qwen3-Omni is laid out: one card for the first, one for the other two."""
    return {
        "name": name,
        "replicas": replicas,
        "entry": "front",
        "stages": [
            {
                "name": "front",
                "entrypoint": "sample_stages:Front",
                "devices": [0],
                "memory": {"utilization": 0.4},
            },
            {
                "name": "back",
                "entrypoint": "sample_stages:Echo",
                "devices": [1],
                "memory": {"utilization": 0.3},
            },
            {
                "name": "side",
                "entrypoint": "sample_stages:Echo",
                "devices": [1],
                "memory": {"utilization": 0.1},
            },
        ],
    }
