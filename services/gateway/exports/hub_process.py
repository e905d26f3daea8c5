"""Process that uploads one folder to a hub: `python -m twinkle_services.gateway.exports.hub_process`.

The hub's client cannot be cancelled, but a process can be killed. The job on standard input is a JSON object with
`folder`, `target`, `token` and `is_private`, so that the token appears in no process list and no environment.
"""

import json
import sys
from typing import Any

from twinkle.hub import HubError, HubUnreachable, upload


def main() -> None:
    """Read the job from standard input, upload the folder, and print the result as JSON."""
    print(json.dumps(_upload(json.load(sys.stdin))))  # noqa: T201 (the parent process reads it)


def _upload(job: dict[str, Any]) -> dict[str, str]:
    try:
        uploaded = upload(job['folder'], job['target'], token=job['token'], is_private=job['is_private'])
    except HubUnreachable:
        return {'failure': 'unreachable'}
    except HubError:
        return {'failure': 'refused'}
    return {'url': uploaded.url, 'commit': uploaded.commit}


if __name__ == '__main__':
    main()
