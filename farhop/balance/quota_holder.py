"""A balancer's part of tenants' limits: borrowed from the root, and spent on each request. See quota.py.

Never spends after its lease ended without an answer. Pure: no IO, no clock.
"""

from __future__ import annotations

from math import floor, inf

from farhop.balance.quota import DRIFT, LEASE_S, LOST_S, Bucket, Grant, LeaseReply, LeaseRequest, Quota, Want

# What a client is told to wait for a slot is what passes between two that end here: at first, at most, and how fast it
# is learned.
INTERVAL_S, INTERVAL_S_MAX, INTERVAL_WEIGHT = 1.0, 10.0, 0.1


class Holding:
    """One bucket at one balancer: the units lent to it, and a `safe` part of its own, which needs no root.

    `used` since the last exchange and `want` determine how much to ask for; `waiting`: the units that requests wait
    for; `open`: the reservations not settled yet. `free`: what was left of the limit at `free_at`; `soon`: see Grant.
    `largest`: the units that one request may take, if it waits long enough.
    `known`: whether there may be something that the root does not know yet; if not, the bucket is left out of the next
    message, and the root forgets its totals.
    """

    __slots__ = (
        "asked",
        "free",
        "free_at",
        "granted",
        "known",
        "largest",
        "name",
        "open",
        "owed",
        "quota",
        "refunded",
        "returned",
        "safe",
        "soon",
        "spent",
        "used",
        "waiting",
        "want",
    )  # fmt: skip

    def __init__(self, name: str, quota: Quota, safe: Quota | None, now: float) -> None:
        self.name = name
        self.used = self.want = self.open = self.waiting = 0
        self.free, self.soon, self.known, self.asked = 0.0, False, False, 0
        self.resize(quota, safe, now)
        self.void()

    def resize(self, quota: Quota, safe: Quota | None, now: float) -> None:
        """Use these sizes from now on. A safe part begins full: what an earlier process of our name spent is
        unknown."""
        self.quota, self.safe = quota, None if safe is None else Bucket(safe, now, safe.depth)
        self.free_at = -inf  # what was left then was of another size
        self.largest = quota.depth if safe is None else max(quota.depth, safe.depth)

    def void(self) -> None:
        """All lent units are lost; the totals start at zero."""
        self.granted = self.spent = self.returned = self.refunded = self.owed = 0

    @property
    def available(self) -> int:
        """The units lent and not spent yet."""
        return self.granted - self.spent - self.returned

    @property
    def idle(self) -> bool:
        """Whether the holding can be dropped: nothing is lent or in flight, and the root knows all totals."""
        return not (self.known or self.open or self.waiting or self.available)

    def fits(self, n: int, now: float) -> bool:
        """Whether `n` units may be taken now."""
        return n <= self.granted - self.spent - self.returned or (self.safe is not None and self.safe.fits(n, now))

    def take(self, n: int) -> bool:
        """Take `n` units, which must fit. Returns whether they were taken from the lent units."""
        self.used += n
        self.open += 1
        if n <= self.granted - self.spent - self.returned:
            self.spent += n
            return True
        assert self.safe is not None  # it fits
        self.safe.level += n
        return False

    def settle(self, taken: int, used: int, lent: bool, now: float) -> None:
        """Correct what was taken to what was used in the end."""
        self.open -= 1
        self.known = True
        if not lent and self.safe is not None:
            if used <= taken:
                self.safe.give(taken - used, now)
            else:
                self.safe.level += used - taken
        elif used <= taken:
            self.refunded += taken - used
        else:
            self.owed += used - taken

    def lacks_s(self, n: int, now: float) -> float:
        """Seconds until the root, as far as it reported, or our safe part may have n for us; 0 if the root may now."""
        if self.soon:
            return 0.0
        lacking = n - self.available - self.free
        if lacking <= 0:
            return 0.0
        lacks_s = max(0.0, self.free_at + lacking / self.quota.rate - now) if self.quota.rate else inf
        return lacks_s if self.safe is None else min(lacks_s, self.safe.lacks_s(n, now))

    @property
    def _totals(self) -> int:
        return self.spent + self.returned + self.refunded + self.owed  # each only rises

    def ask(self) -> Want | None:
        """The message for its root now; None: none, and nothing is wanted. Units beyond those wanted are returned."""
        self.want = want = min(max(2 * self.used, self.want // 2, self.waiting), floor(self.quota.depth))
        self.used = 0
        self.returned += max(0, self.available - want)
        if not (want or self.open or self.known):
            return None
        self.known, self.asked = True, self._totals
        return Want(self.name, self.spent, self.returned, self.refunded, self.owed, want, self.waiting)

    def leave(self) -> None:
        """Withdraw all requests for more units."""
        self.used = self.want = self.waiting = 0

    def apply(self, grant: Grant, now: float) -> None:
        """Process the root's answer to the last request."""
        self.granted, self.free = max(self.granted, grant.granted), grant.free
        self.known = bool(self.want or self.open or self.available) or self.asked != self._totals
        self.soon, self.free_at = grant.soon, now


class SlotsHeld(Holding):
    """Slots as a balancer has them: `held`, of which `taken` are under way, `most` at once since the last request. So
    many are `over` that are let go when they end. `own` are taken of its safe part, which may be used from `own_from`.
    `interval_s`: between two requests that end here, of late. `known`: its root may think that we have some; `lost`: or
    that we have none any more."""

    __slots__ = ("ended_at", "held", "interval_s", "lost", "most", "over", "own", "own_from", "taken")

    def __init__(self, name: str, quota: Quota, safe: Quota | None, now: float) -> None:
        self.held = self.taken = self.most = self.over = self.own = 0
        self.lost, self.interval_s, self.ended_at = False, INTERVAL_S, now
        super().__init__(name, quota, safe, now)

    def resize(self, quota: Quota, safe: Quota | None, now: float) -> None:
        """Of other sizes from now on. What is ours from now on others may have until their leases are over."""
        super().resize(quota, safe, now)
        self.void()
        self.own_from = now + LEASE_S * (1 + DRIFT)

    def void(self) -> None:
        """All lent slots are lost, except those in use, until their requests end."""
        self.held = self.over = self.taken

    @property
    def available(self) -> int:
        """The slots held and not in use."""
        return self.held - self.taken

    @property
    def idle(self) -> bool:
        """Whether nothing is lent or in use, so that the holding can be dropped."""
        return not (self.known or self.held or self.own or self.waiting)

    def fits(self, n: int, now: float) -> bool:
        """Whether `n` units may be taken now."""
        if n <= self.held - self.taken:
            return True
        return self.safe is not None and now >= self.own_from and self.own + n <= self.safe.quota.depth

    def take(self, n: int) -> bool:
        """Take `n` units, which must fit. Returns whether they were taken from the lent units."""
        if n > self.held - self.taken:
            self.own += n
            return False
        self.taken += n
        if self.taken > self.most:
            self.most = self.taken
        return True

    def settle(self, taken: int, used: int, lent: bool, now: float) -> None:  # noqa: ARG002 - what was taken is free
        """The requests that took these slots are over."""
        if lent:
            self.taken -= taken
            if self.over:
                self.held -= taken
                self.over -= taken
        else:
            self.own -= taken
        self.interval_s += INTERVAL_WEIGHT * (min(max(0.0, now - self.ended_at), INTERVAL_S_MAX) - self.interval_s)
        self.ended_at = now

    def lacks_s(self, n: int, now: float) -> float:
        """Seconds until another may have ended, 0 if the root may have n for us now."""
        if self.soon or n <= self.available + self.free:
            return 0.0
        return max(0.0, self.free_at + self.interval_s - now)

    def ask(self) -> Want | None:
        """What to send to the root now; None if there is nothing to report or to ask for. Slots beyond what is wanted
        are returned.
        """
        self.want = want = min(max(2 * self.waiting, self.most - self.taken, self.want // 2), floor(self.quota.depth))
        self.most = self.taken
        self.held = min(self.held, self.taken + want)
        if not (want or self.held or self.known):
            return None
        self.known = True
        spare = self.held - self.taken
        return Want(
            self.name, self.taken, owed=self.held if self.lost else 0, wanted=want - spare,
            least=max(0, self.waiting - spare), held=self.held,
        )  # fmt: skip

    def leave(self) -> None:
        """Withdraw all requests for more units."""
        super().leave()
        self.most = self.taken

    def apply(self, grant: Grant, now: float) -> None:
        """Process the root's answer to the last request."""
        self.held, self.known = grant.granted, grant.granted > 0
        self.over, self.lost = 0, False
        if grant.free < 0:  # a limit that is a lower one now, or somebody who was given up for lost is back
            left = self.held + floor(grant.free)
            self.held, self.over = max(self.taken, left), max(0, self.taken - left)
        self.free, self.soon, self.free_at = max(0.0, grant.free), grant.soon, now


def new_holding(name: str, quota: Quota, safe: Quota | None, now: float) -> Holding:
    """The bucket of a balancer that has not borrowed anything yet."""
    return (SlotsHeld if quota.slots else Holding)(name, quota, safe, now)


class Holder:
    """All that a balancer has of one root. `asked` and `on_reply` enclose an exchange; one is under way at a time."""

    def __init__(self) -> None:
        self.holdings: dict[str, Holding] = {}
        self._lease, self.lease_until, self._number = 0, -inf, 0
        self._ended = -inf  # the last lease, where there is none

    def alive(self, now: float) -> bool:
        """Whether what is lent may be spent. What may not is given up, for good."""
        if now <= self.lease_until:
            return True
        if self._lease:
            self.void()
        return False

    def void(self) -> None:
        """Give up everything that is lent."""
        self._lease, self.lease_until, self._ended = 0, -inf, self.lease_until
        for one in self.holdings.values():
            one.void()

    def asked(self, now: float) -> LeaseRequest:
        """The next message to the root, if there is something to report or to ask for."""
        self.alive(now)
        self._number += 1
        if not self._lease and now > self._ended + LOST_S:
            for one in self.holdings.values():
                if isinstance(one, SlotsHeld):
                    one.lost = True
        wants = (one.ask() for one in self.holdings.values())
        return LeaseRequest(self._lease, self._number, tuple(want for want in wants if want is not None), now)

    def leaves(self, now: float) -> LeaseRequest:
        """The last word of a holder under which nothing is under way any more."""
        for one in self.holdings.values():
            one.leave()
        return self.asked(now)

    def on_reply(self, reply: LeaseReply, request: LeaseRequest, now: float) -> None:
        """Take the answer to a request: it counts from when that was made. What was given up since does not return."""
        self.alive(now)
        if request.lease != self._lease or request.number != self._number or now > request.at + LEASE_S:
            return
        if reply.lease != self._lease:
            self.void()
            self._lease = reply.lease
        self.lease_until = request.at + LEASE_S
        for grant in reply.grants:
            one = self.holdings.get(grant.bucket)
            if one is not None:
                one.apply(grant, now)
