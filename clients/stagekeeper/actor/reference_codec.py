"""Mesh references on the wire: MessagePack extensions 3 (actors) and 4 (processes).

Decided here: what a reference carries: enough to ask the owner, and nothing that goes stale.
Invariant: a reference that comes back to its owner's process is the owner's own mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from stagekeeper.actor.endpoint import Endpoint
from stagekeeper.actor.entrypoint import EntrypointError, load_class
from stagekeeper.actor.hosts import ProcMesh, proc_reference
from stagekeeper.actor.mesh import ActorMesh
from stagekeeper.actor.owning.references import ReferenceKeeper
from stagekeeper.actor.place import Place
from stagekeeper.actor.program import current_program
from stagekeeper.wire.extensions import register_extension

_ACTORS: Final = 3
_PROCS: Final = 4


class _Reference(msgspec.Struct, array_like=True):
    kind: str
    mesh_id: str
    name: str
    size: int
    ranks: list[int]
    entrypoint: str
    main_path: str
    address: str
    instance_id: str
    pid: int
    boot_id: str


def pack(mesh: Any) -> bytes:
    """Turn a mesh into its reference."""
    if isinstance(mesh, ActorMesh):
        keeper = mesh._keeper
        owner = keeper.owner if isinstance(keeper, ReferenceKeeper) else mesh._program.place
        entrypoint, main_path = mesh._entrypoint
        return _packed(
            "actors",
            keeper.mesh_id,
            mesh.name,
            len(keeper.ranks),
            list(mesh.ranks),
            (entrypoint, main_path),
            owner,
        )
    if isinstance(mesh, ProcMesh):
        mesh_id, owner, indexes, size = mesh.reference()
        return _packed("procs", mesh_id, mesh.name, size, list(indexes), ("", ""), owner)
    raise TypeError(f"{type(mesh).__qualname__} does not travel")


def _packed(
    kind: str,
    mesh_id: str,
    name: str,
    size: int,
    ranks: list[int],
    entrypoint: tuple[str, str],
    owner: Place,
) -> bytes:
    return msgspec.msgpack.encode(
        _Reference(
            kind,
            mesh_id,
            name,
            size,
            ranks,
            *entrypoint,
            owner.address,
            owner.instance_id,
            owner.pid,
            owner.boot_id,
        )
    )


def unpack(data: bytes) -> Any:
    """Turn a reference into a mesh of this process's tree."""
    said = msgspec.msgpack.decode(data, type=_Reference)
    program = current_program()
    if not said.ranks or not all(0 <= rank < said.size for rank in said.ranks):
        raise ValueError(f"a reference to ranks {said.ranks} of a mesh of {said.size}")
    owner = Place(said.address, said.instance_id, said.pid, said.boot_id)
    known = program.owned(said.mesh_id)
    if said.kind == "procs":
        whole = (
            known.mesh
            if known is not None
            else proc_reference(program, said.mesh_id, said.name, said.size, owner)
        )
        return whole if len(said.ranks) == said.size else whole[said.ranks]
    if known is not None:
        mesh = known.mesh
        return mesh if len(said.ranks) == said.size else mesh[said.ranks]
    return ActorMesh(
        program,
        program.reference_keeper(said.mesh_id, said.name, said.size, owner),
        tuple(said.ranks),
        _endpoints_of(said.entrypoint, said.main_path),
        (said.entrypoint, said.main_path),
        said.entrypoint.rpartition(":")[2],
    )


def _endpoints_of(entrypoint: str, main_path: str) -> Mapping[str, Endpoint] | None:
    """Return the endpoints of a class, where it can be had here; else names are not checked."""
    try:
        return load_class(entrypoint, main_path).__endpoints__
    except EntrypointError:
        return None


register_extension(_ACTORS, ActorMesh, pack, unpack)
register_extension(_PROCS, ProcMesh, pack, unpack)
