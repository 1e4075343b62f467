"""Say which build of torch an install would take, and how large it is, before it begins.

Usage: which_torch.py [pip's index options]. Prints a sentence; never fails an install.
"""

import json
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path


def main() -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--report", "-"]
    command += ["-c", "constraints.txt", *sys.argv[1:], "torch"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        planned = json.loads(answer.stdout)["install"]
        if not planned:
            return
        url = planned[0]["download_info"]["url"]
        name = urllib.parse.unquote(Path(urllib.parse.urlparse(url).path).name)
        print(f"installing {name} ({size_of(url) / 1e6:,.0f} MB{what_follows(name)})", flush=True)
    except (ValueError, KeyError, OSError):
        print("installing torch; on Linux the public index gives the CUDA build (about 2.5 GB)", flush=True)


def size_of(url: str) -> int:
    if url.startswith("file:"):
        return Path(urllib.request.url2pathname(urllib.parse.urlparse(url).path)).stat().st_size
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:
        return int(answer.headers["Content-Length"])


def what_follows(name: str) -> str:
    """The CUDA build on Linux brings NVIDIA's libraries, which are larger than itself."""
    if "+cpu" in name or "linux" not in name or "aarch64" in name:
        return ""
    return " and as much as 2 GB of NVIDIA libraries; TORCH_INDEX=URL takes a CPU build, see README"


if __name__ == "__main__":
    main()
