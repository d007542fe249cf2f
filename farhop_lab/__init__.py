"""Worlds to run both tiers in: emulated engines, a collector of spans, a whole fleet on one machine, the demo."""

import os

# What gRPC does after a fork (grpc/grpc#43055, since 1.80) kills one in some thirty children before their program
# begins, if channels are in use meanwhile. A process that only starts programs does not need it. Read when gRPC is
# imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
