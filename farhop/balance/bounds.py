"""Bounds on what one process holds: bytes buffered, slots taken; and each holder's share of them.

Invariants: 0 <= used <= capacity, always; what a holder has is never above SHARE times what is left for others, or a
FLOOR-th of all if that is more. Never waits: what does not fit is refused at once, by False. Giving back more than was
taken is an error of the caller and raises: otherwise the bound would not hold.

Shares are dynamic thresholds (Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches",
IEEE/ACM Transactions on Networking 6(2), 1998): a holder that is alone may have SHARE / (1 + SHARE) = 80 % of all, the
rest is kept for the next one; of k that want as much as they can get, each has SHARE / (1 + k SHARE), and one that
wants less gets all it wants: max-min fair, without a list of holders.
"""

SHARE = 4
FLOOR = 64


class Limit:
    """A capacity that is taken from and given back to, all or nothing. With a `holder` it counts towards its share."""

    __slots__ = ("_capacity", "_floor", "_held", "_noted", "_used")
    _what = "capacity"

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"{self._what} must be 0 or more, not {capacity!r}")
        self._capacity = capacity
        self._floor = max(1, capacity // FLOOR)
        self._used = self._noted = 0
        self._held: dict[str, int] = {}

    @property
    def capacity(self) -> int:
        """The limit."""
        return self._capacity

    @property
    def used(self) -> int:
        """The amount taken and not given back."""
        return self._used

    @property
    def noted(self) -> int:
        """The amount held outside of take() and give(), as last noted."""
        return self._noted

    @property
    def holders(self) -> int:
        """The number of named holders that hold something."""
        return len(self._held)

    def held(self, holder: str) -> int:
        """The amount that a holder holds."""
        return self._held.get(holder, 0)

    def fits(self, n: int) -> bool:
        """Whether there is room for n, whosever share it would count to."""
        return self._used + self._noted + n <= self._capacity

    def crowds(self, holder: str) -> bool:
        """Whether a holder has at least as much as the others on average, and so is the cause of refusals."""
        return self._held.get(holder, 0) * len(self._held) >= self._used > 0

    def note(self, n: int) -> None:
        """Set the amount in use that is measured rather than taken; it reduces what can be taken."""
        self._noted = n

    def take(self, n: int = 1, holder: str | None = None) -> bool:
        """Take `n`, or nothing. Returns whether it was taken. Raises ValueError if `n` is negative."""
        if n < 0:
            raise ValueError(f"cannot take {n}: give() them back instead")
        used = self._used + n
        free = self._capacity - used - self._noted
        if free < 0:
            return False
        if holder is not None:
            held = self._held.get(holder, 0) + n
            if n and held > SHARE * free and held > self._floor:
                return False
            if held:
                self._held[holder] = held
        self._used = used
        return True

    def give(self, n: int = 1, holder: str | None = None) -> None:
        """Give n back. ValueError if n is negative or more than is taken, by this holder."""
        if n < 0 or n > self._used:
            raise ValueError(f"cannot give back {n} of {self._used} taken")
        if holder is not None:
            left = self._held.get(holder, 0) - n
            if left < 0:
                raise ValueError(f"cannot give back {n} of {left + n} taken by this holder")
            if left:
                self._held[holder] = left
            else:
                self._held.pop(holder, None)
        self._used -= n

    def move(self, n: int, holder: str, to: str) -> bool:
        """Let n count towards another's share. False, and nothing is changed, if that one has its share already."""
        self.give(n, holder)
        if self.take(n, to):
            return True
        self._held[holder] = self._held.get(holder, 0) + n
        self._used += n
        return False


class ByteBudget(Limit):
    """One limit on all buffered bytes. Every `take` needs its `give`."""

    __slots__ = ()
    _what = "capacity_bytes"

    @property
    def capacity_bytes(self) -> int:
        """The limit."""
        return self._capacity

    @property
    def used_bytes(self) -> int:
        """Bytes taken and not given back."""
        return self._used


class SlotLimit(Limit):
    """One limit on a number of things: connections, requests. Every `take` needs its `give`."""

    __slots__ = ()
