"""Before huggingface_hub is imported: no test sees the user's hub, cache or switches. The hub is `tests.hub_server`'s."""

import os
import socket
import tempfile

for name in list(os.environ):
    if name.startswith(("HF_", "HUGGINGFACE_", "TRANSFORMERS_OFFLINE", "HUGGING_FACE_")):
        del os.environ[name]

PORT = socket.socket()  # of this process alone; nobody listens until a test starts the hub
PORT.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
PORT.bind(("127.0.0.1", 0))
HOME = tempfile.TemporaryDirectory(prefix="hub")
os.environ |= {
    "HF_ENDPOINT": f"http://127.0.0.1:{PORT.getsockname()[1]}",
    "HF_HOME": HOME.name,
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
