"""A process that uploads one folder to a hub and ends: `python -m services.gateway.exports.hub_process`.

The client of the hub blocks and cannot be stopped; a process can. What it needs comes over its standard input, the
token among it, which so stands neither in a list of processes nor in an environment.
"""

import json
import sys
from typing import Any

from twinkle.hub import HubError, HubUnreachable, upload


def main() -> None:
    """Read the order, upload, and print what came of it."""
    print(json.dumps(_carried_out(json.load(sys.stdin))))  # noqa: T201 (whoever started it reads this)


def _carried_out(order: dict[str, Any]) -> dict[str, str]:
    try:
        made = upload(order['folder'], order['target'], token=order['token'], is_private=order['is_private'])
    except HubUnreachable:
        return {'failure': 'unreachable'}
    except HubError:
        return {'failure': 'refused'}
    return {'url': made.url, 'commit': made.commit}


if __name__ == '__main__':
    main()
