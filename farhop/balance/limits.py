"""Bounds on what one process holds: bytes buffered, slots taken.

Invariant: 0 <= used <= capacity, always. Never waits: what does not fit is refused at once, by False. Giving back more
than was taken is a fault of the caller and raises, since a bound that forgives does not bound.
"""


class ByteBudget:
    """One cap on all buffered bytes. `take` and `give` must balance."""

    __slots__ = ("_capacity_bytes", "_used_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes must be 0 or more, not {capacity_bytes!r}")
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """The cap."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes taken and not given back."""
        return self._used_bytes

    def take(self, n: int) -> bool:
        """Take n bytes, all or nothing. ValueError if n is negative."""
        if n < 0:
            raise ValueError(f"cannot take {n} bytes: give() them back instead")
        used_bytes = self._used_bytes + n
        if used_bytes > self._capacity_bytes:
            return False
        self._used_bytes = used_bytes
        return True

    def give(self, n: int) -> None:
        """Give n bytes back. ValueError if n is negative or more than is taken."""
        if n < 0 or n > self._used_bytes:
            raise ValueError(f"cannot give back {n} bytes of {self._used_bytes} taken")
        self._used_bytes -= n


class SlotLimit:
    """One cap on things counted singly: connections, requests. `take` and `give` must balance."""

    __slots__ = ("_capacity", "_used")

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must be 0 or more, not {capacity!r}")
        self._capacity = capacity
        self._used = 0

    @property
    def capacity(self) -> int:
        """The cap."""
        return self._capacity

    @property
    def used(self) -> int:
        """Slots taken and not given back."""
        return self._used

    def take(self) -> bool:
        """Take a slot, or False if none is left."""
        if self._used >= self._capacity:
            return False
        self._used += 1
        return True

    def give(self) -> None:
        """Give a slot back. ValueError if none is taken."""
        if self._used == 0:
            raise ValueError("give() without take(): a slot is given back once")
        self._used -= 1
