"""Records of requests that must not be lost: usage, and what was decided under which law."""
