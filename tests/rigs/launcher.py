"""Stands for `torchrun` where the launch is not what is tested: asks `tests.rigs.ranks` for a job, and ends as it does.

    python launcher.py SOCKET --standalone --nproc-per-node 2 SCRIPT ARGUMENT...

It imports next to nothing, as it is started in place of three interpreters that import torch.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(sys.argv[1])
    order = [sys.argv[2:], os.getcwd(), dict(os.environ)]
    socket.send_fds(server, [json.dumps(order).encode()], [1, 2])
    code = int(server.recv(64) or 1)
sys.exit(code if code >= 0 else 1)
