"""Run each test that the last runs of pytest have failed once more, alone; what then passes is
listed as flaky.

Exits with 1 if one fails again, or if so many failed that it is not chance. Prints nothing where
none has failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MANY = 8
"""More failures than these are not run again."""
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def passes_alone(test: str) -> bool:
    """True if the test passes in a process of its own. Its output is printed by pytest."""
    print(f"\nagain, alone: {test}", flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
    try:
        return subprocess.run(command, timeout=900).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main() -> int:
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if len(failed) > MANY:
        print(f"{len(failed)} tests failed, too many to be chance; none is run again")
        return 1
    flaky = [test for test in failed if passes_alone(test)]
    for test in failed:
        print(f"{'FLAKY (passed alone)' if test in flaky else 'FAILED twice'}: {test}")
    return int(len(flaky) < len(failed))


if __name__ == "__main__":
    sys.exit(main())
