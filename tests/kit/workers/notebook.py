"""Runs the cells of a notebook in a real Jupyter kernel: a list of texts as JSON on stdin.

Prints a list with what each cell wrote, its value, and its error, as JSON.
"""

import json
import sys
from tempfile import TemporaryDirectory
from typing import Any

from jupyter_client.manager import KernelManager

LIMIT = 100.0
"""Seconds for one cell, so that a kernel that hangs ends the test."""


def main() -> None:
    # Sockets in files: a port that is free now may be taken before the kernel has it. Their paths
    # may have a hundred characters.
    with TemporaryDirectory(prefix="kernel") as sockets:
        manager = KernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/socket")
        manager.connection_file = f"{sockets}/connection.json"
        results = results_of(json.load(sys.stdin), manager)
    json.dump(results, sys.stdout)


def results_of(cells: list[str], manager: KernelManager) -> list[dict[str, str]]:
    assert manager.kernel_spec is not None
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel()
    client = manager.client()
    results: list[dict[str, str]] = []
    try:
        client.start_channels()
        client.wait_for_ready(timeout=LIMIT)
        for cell in cells:
            result = {"text": "", "value": "", "error": ""}

            def note(message: dict[str, Any], result: dict[str, str] = result) -> None:
                content = message["content"]
                match message["msg_type"]:
                    case "stream":
                        result["text"] += content["text"]
                    case "execute_result":
                        result["value"] = content["data"]["text/plain"]
                    case "error":
                        result["error"] = f"{content['ename']}: {content['evalue']}"

            client.execute_interactive(cell, timeout=LIMIT, output_hook=note)
            results.append(result)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return results


if __name__ == "__main__":
    main()
