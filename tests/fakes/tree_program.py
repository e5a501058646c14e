"""The root of a small actor tree, to be killed: `tree_program.py TREE_ID WARDEN EXTRA`.

Starts one `tree_proc` and prints its address once that is up. Without a warden ("no") only the
kernel and the process itself see to the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from pathlib import Path

from stagekeeper.host.proc_launch import launch, own_pythonpath
from stagekeeper.host.proc_line import ProcLaunch
from stagekeeper.host.process import boot_id
from stagekeeper.host.warden import start_warden
from tests.fakes.tree_proc import MODULE


async def main() -> None:
    tree_id, has_warden, extra = sys.argv[1], sys.argv[2] == "yes", json.loads(sys.argv[3])
    if has_warden:
        start_warden(tree_id)
    instance_id = str(uuid.uuid4())
    spec = ProcLaunch(
        instance_id=instance_id,
        name="workers",
        tree_path=f"{tree_id}/{instance_id}",
        token="secret",
        listen_host="127.0.0.1",
        lease_s=3,
        boot_id=boot_id(),
        owner="a test",
        pythonpath=own_pythonpath(),
        extra=extra,
    )
    proc = await launch(
        spec, env=os.environ, cwd=Path("/"), log_path=None, start_timeout_s=60, module=MODULE
    )
    print("up", proc.address, flush=True)
    print("ended", await proc.gone(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
