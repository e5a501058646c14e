"""`plan`, and `deploy --plan-id`, against real processes."""

from __future__ import annotations

import json
import re

from stagekeeper.cli.exits import ExitCode
from tests.harness.cluster import Cluster
from tests.harness.command_line import command_line

OMNI = """\
name: qwen3-omni
replicas: {replicas}
stages:
  - {{name: thinker, entrypoint: "sample_stages:Echo", devices: [0], memory: {{utilization: 0.9}}}}
  - {{name: talker, entrypoint: "sample_stages:Echo", devices: [1], memory: {{utilization: 0.6}}}}
  - {{name: code2wav, entrypoint: "sample_stages:Front", devices: [1], memory: {{bytes: 64MiB}}}}
"""


async def test_plan_is_looked_at_then_deployed_by_its_id_then_has_nothing_to_do() -> None:
    async with Cluster() as cluster:
        await cluster.start_supervisor()
        end = cluster.endpoint
        spec = cluster.directory / "spec.yaml"
        spec.write_text(OMNI.format(replicas=1))

        alone = await command_line("plan", str(spec), endpoint=end)
        assert alone.code == ExitCode.FAILED
        assert "no worker is registered: start an agent" in alone.out

        await cluster.start_agent()
        shown = await command_line("plan", str(spec), endpoint=end)
        assert shown.code == ExitCode.DONE, shown.err
        assert "qwen3-omni: it fits: replica 0 would start\n" in shown.out
        assert re.search(r"^2 +talker → code2wav +1 +unknown$", shown.out, re.M)
        assert "0        node-1  0 is cpu:0, 1 is cpu:1\n" in shown.out
        assert re.search(r"cpu:0 +new +921\.6 MiB +0/thinker: 0\.9 of 1 GiB", shown.out)
        again = re.search(r"stagekeeper deploy (\S+) --plan-id (\S+)$", shown.out, re.M)
        assert again is not None and again[1] == str(spec)
        assert not cluster.stage_processes()

        other = cluster.directory / "other.yaml"
        other.write_text(OMNI.format(replicas=2))
        stale = await command_line("deploy", str(other), "--plan-id", again[2], endpoint=end)
        assert stale.code == ExitCode.FAILED
        assert not cluster.stage_processes()

        made = await command_line("deploy", str(spec), "--plan-id", again[2], endpoint=end)
        assert made.code == ExitCode.DONE, made.err
        done = await command_line("plan", str(spec), "-o", "json", endpoint=end)
        document = json.loads(done.out)
        assert (document["kept_replicas"], document["replicas"], document["fits"]) == (
            [0],
            [],
            True,
        )
        assert document["estimated_s"] > 0, "it has been started here before"

        full = await command_line("plan", str(other), endpoint=end)
        assert full.code == ExitCode.FAILED
        assert re.search(r"^DEPLOYMENT_EXISTS +- ", full.out, re.M)
        assert re.search(
            r"^ADMISSION_REFUSED +node-1 cpu:\d +no room for .* replica 1", full.out, re.M
        )
        assert "stagekeeper delete qwen3-omni" in full.err
