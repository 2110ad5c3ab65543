"""python -m tests.busy N COMMAND...: run a command next to N processes that keep a core busy each."""

import subprocess
import sys

processes = [
    subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(int(sys.argv[1]))
]
try:
    sys.exit(subprocess.run(sys.argv[2:]).returncode)
finally:
    for process in processes:
        process.kill()
