"""The divided model across a network: one gRPC stream between a device and the cloud."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or what a stranger sends would stand in the log, raw
