"""`stagekeeper status`: what runs where, why it is so, and what happens next."""

from __future__ import annotations

from stagekeeper.cli import flags
from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT


def status(
    endpoint: flags.Endpoint = DEFAULT_ENDPOINT,
    output: flags.OutputFormat = flags.Output.TEXT,
    insecure: flags.Insecure = False,
) -> None:
    """Show workers, deployments, replicas and stages.

    It is read from the supervisor's memory and answers at once, whatever workers do.
    """
    import json

    from stagekeeper.cli.asking import ask
    from stagekeeper.cli.text.status import status_text
    from stagekeeper.cli.text.status_json import FAILURES_SHOWN, status_json
    from stagekeeper.cli.text.tables import write_page
    from stagekeeper.client import Client

    async def work(client: Client) -> None:
        workers, deployments = await client.workers(), await client.list()
        if output is flags.Output.JSON:
            failures = await client.failures(limit=FAILURES_SHOWN)
            document = status_json(endpoint, workers, deployments, failures)
            print(json.dumps(document, indent=2, ensure_ascii=False))
            return
        text = status_text(endpoint, workers, deployments)
        write_page((text.headline,), text.tables, text.notes)

    ask(endpoint, work, insecure=insecure)
