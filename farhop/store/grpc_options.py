"""What every gRPC connection of a balancer is told of its flow control, whichever side it is.

By default gRPC measures a connection's bandwidth with a ping of its own behind whatever comes, to size its window: with
a message a second that doubles the wake-ups of both processes (docs/measurements/performance.md). Here the window is
fixed, and nothing is measured. Never one without the other: without measuring alone the window is 64 KiB, and 4 MB took
4.2 s over 100 ms where they take 0.15 s with it.
"""

WINDOW_BYTES = 4 * 1024 * 1024  # 28 MB a second at 150 ms; what a peer may send that nobody has read yet
FIXED_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW_BYTES))
