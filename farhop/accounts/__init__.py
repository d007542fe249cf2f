"""What is told of requests afterwards and must not be lost: who used what, and what was decided under which law."""
