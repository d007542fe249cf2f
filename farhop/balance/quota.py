"""What tenants may use over a whole fleet: buckets at one root, lent out in leases, and taken from locally.

A limit of N units per period is a bucket (GCRA: ITU-T I.371; RFC 2697's token bucket) of depth N that leaks N per
period. Its root lends units to holders, the balancers that clients come to; a unit leaks only once it was spent.
Invariants: what is spent, whoever spends it, is within depth + rate x time + what was given back, for every interval;
so under lost, late and doubled messages, crashes of anybody, and moves of the root. A holder does not spend after
LEASE_S without an answer; what a root lost sight of counts as spent; a root never lends beyond the mark that its
successor will begin from. Pure: no IO, no clock (`now` is each side's own monotonic seconds).
"""

from __future__ import annotations

from math import ceil, floor, inf

import msgspec

LEASE_S = 10.0
DRIFT = 0.01  # how much one clock may run faster than another: a hundred times what quartz does
# What a root may lend beyond its level when it wrote that down, whichever is most: of depth, of time, in units.
AHEAD_SHARE, AHEAD_S, AHEAD_MIN = 0.02, 60.0, 4.0

MARKS_MAX = 8192  # of buckets that are no more


class Quota(msgspec.Struct, frozen=True):
    """A bucket's size: `depth` in units, `rate` in units per second."""

    depth: float
    rate: float

    def part(self, share: float) -> Quota:
        """A share of it, from 0 to 1."""
        return Quota(self.depth * share, self.rate * share)


class Bucket:
    """A leaky bucket. `level` is what has not leaked yet; until `at` nothing leaks."""

    __slots__ = ("at", "level", "quota")

    def __init__(self, quota: Quota, now: float, level: float = 0.0) -> None:
        self.quota, self.at, self.level = quota, now, level

    def leak(self, now: float) -> float:
        """The level at `now`. A clock that stands still, or steps back, leaks nothing."""
        if now > self.at:
            self.level = max(0.0, self.level - (now - self.at) * self.quota.rate)
            self.at = now
        return self.level

    def fits(self, n: float, now: float) -> bool:
        """Whether n more would be within its depth."""
        return self.leak(now) + n <= self.quota.depth

    def give(self, n: float, now: float) -> None:
        """Take n out: what was put in was not used. What has leaked already stays so."""
        self.level = max(0.0, self.leak(now) - n)


# -- what travels


class Want(msgspec.Struct, frozen=True):
    """A holder's word on one bucket, in units since its lease began: totals, so that a lost or doubled one harms not.

    `spent`, `returned` (unspent), `refunded` (spent, and not used after all), `owed` (used beyond what was taken);
    `wanted`: what it would like to have unspent; `least`: what requests wait for now.
    """

    bucket: str
    spent: int = 0
    returned: int = 0
    refunded: int = 0
    owed: int = 0
    wanted: int = 0
    least: int = 0


class Grant(msgspec.Struct, frozen=True):
    """A root's word: `granted` since the lease began; `free`: what is left of the limit; `soon`: that it
    lends more of it once it has written down that it may."""

    bucket: str
    granted: int = 0
    free: float = 0.0
    soon: bool = False


class Told(msgspec.Struct, frozen=True):
    """An answer. With another `lease` than asked with, all totals begin from 0 again."""

    lease: int
    grants: tuple[Grant, ...] = ()


# -- the root


class _Account:
    __slots__ = ("granted", "owed", "refunded", "returned", "spent")

    def __init__(self) -> None:
        self.granted = self.spent = self.returned = self.refunded = self.owed = 0

    @property
    def unspent(self) -> int:
        return self.granted - self.spent - self.returned


class _Lease:
    __slots__ = ("accounts", "holder", "id", "until")

    def __init__(self, number: int, holder: str) -> None:
        self.id, self.holder, self.until = number, holder, -inf
        self.accounts: dict[str, _Account] = {}


class _Lent(Bucket):
    """A bucket at its root: `lent` is unspent elsewhere, `mark` what a successor takes for its level, `next` that of
    the snapshot that is being written. `told` is the part of its level that holders told they spent: the rest may be
    unspent elsewhere, and nothing is given back of that."""

    __slots__ = ("lent", "mark", "next", "told")

    def __init__(self, quota: Quota, now: float, level: float = 0.0, mark: float = 0.0) -> None:
        super().__init__(quota, now, level)
        self.lent, self.mark, self.next, self.told = 0, mark, mark, 0.0

    def leak(self, now: float) -> float:
        before = self.level
        self.told = max(0.0, self.told - before + super().leak(now))
        return self.level

    def refund(self, n: int, now: float) -> None:
        """Give n back, as far as that was told to be spent and has not leaked."""
        self.leak(now)
        n_told = min(float(n), self.told)
        self.told -= n_told
        self.give(n_told, now)

    def free(self, now: float) -> float:
        return min(self.quota.depth, self.mark) - self.leak(now) - self.lent

    @property
    def ahead(self) -> float:
        return max(self.quota.depth * AHEAD_SHARE, self.quota.rate * AHEAD_S, AHEAD_MIN)

    @property
    def runs_out(self) -> bool:
        """Whether half of what may be lent ahead is lent, and there could be more."""
        return self.mark < self.quota.depth and self.level + self.lent >= self.mark - self.ahead / 2


class Root:
    """The buckets of one root in one term. `marks` are its predecessor's; `first_lease` is above all of its leases.

    A bucket that no mark names was never lent from. What a predecessor lent may be spent for LEASE_S still, so that
    nothing leaks before.
    """

    def __init__(self, marks: dict[str, int], now: float, first_lease: int) -> None:
        self._marks, self._next_lease = dict(marks), first_lease
        self._leaks_from = now + LEASE_S * (1 + DRIFT)
        self.runs_out = False  # a snapshot is wanted, so that more can be lent
        self._buckets: dict[str, _Lent] = {}
        self._leases: dict[int, _Lease] = {}  # also those that their holder does not know of, until they end

    def configure(self, quotas: dict[str, Quota], now: float) -> None:
        """These are all the buckets from now on; one whose size changes keeps its level."""
        for name in self._buckets.keys() - quotas.keys():
            bucket = self._buckets.pop(name)
            self._marks[name] = ceil(max(bucket.mark, bucket.next))  # it may come again
            if len(self._marks) > MARKS_MAX:
                del self._marks[next(iter(self._marks))]
            for lease in self._leases.values():
                lease.accounts.pop(name, None)
        for name, quota in quotas.items():
            known = self._buckets.get(name)
            if known is not None:
                known.leak(now)
                known.quota = quota
                continue
            level = self._marks.pop(name, None)
            if level is None:
                self._buckets[name] = _Lent(quota, now)
            else:
                self._buckets[name] = _Lent(quota, max(now, self._leaks_from), float(level), float(level))

    def snapshot(self, now: float) -> dict[str, int]:
        """The marks to write down. Until `written` it lends within these and the ones before."""
        self._expire(now)
        for bucket in self._buckets.values():
            bucket.next = ceil(min(bucket.quota.depth, bucket.leak(now) + bucket.lent + bucket.ahead))
            bucket.mark = min(bucket.mark, bucket.next)
        return {name: int(bucket.next) for name, bucket in self._buckets.items()} | self._marks

    def written(self) -> None:
        """The last snapshot stands."""
        self.runs_out = False
        for bucket in self._buckets.values():
            bucket.mark = bucket.next

    def exchange(self, holder: str, lease: int, wants: tuple[Want, ...], now: float) -> Told:
        """Take what a holder tells, and lend."""
        self._expire(now)
        known = self._leases.get(lease)
        if known is None or known.holder != holder:
            known = self._leases[self._next_lease] = _Lease(self._next_lease, holder)
            self._next_lease += 1
            wants = tuple(Want(want.bucket, wanted=want.wanted, least=want.least) for want in wants)
        known.until = now + LEASE_S * (1 + DRIFT)
        return Told(known.id, tuple(self._lend(known, want, now) for want in wants if want.bucket in self._buckets))

    def _lend(self, lease: _Lease, want: Want, now: float) -> Grant:
        bucket = self._buckets[want.bucket]
        account = lease.accounts.setdefault(want.bucket, _Account())
        bucket.leak(now)
        spent, returned = max(0, want.spent - account.spent), max(0, want.returned - account.returned)
        owed, refunded = max(0, want.owed - account.owed), max(0, want.refunded - account.refunded)
        spent = min(spent, account.unspent)  # nobody spends, or returns, what was not lent
        returned = min(returned, account.unspent - spent)
        bucket.lent -= spent + returned
        bucket.level += spent + owed
        bucket.told += spent + owed
        account.spent += spent
        account.returned += returned
        account.owed += owed
        account.refunded += refunded
        if refunded:
            bucket.refund(refunded, now)
        free = bucket.free(now)
        lacking = max(0, want.wanted - account.unspent)
        # Half of what is left, so that the next finds some; but what waits is served if it can be.
        more = max(0, min(lacking, floor(free), max(want.least - account.unspent, floor(free / 2))))
        account.granted += more
        bucket.lent += more
        soon = bucket.runs_out
        self.runs_out |= soon
        # Of the whole limit, which is what clients are told: who asks for more than is written down finds `soon`.
        left = bucket.quota.depth - bucket.level - bucket.lent
        return Grant(want.bucket, account.granted, max(0.0, left), soon)

    def _write_off(self, lease: _Lease, now: float) -> None:
        """What it has not told of may be spent."""
        for name, account in lease.accounts.items():
            bucket = self._buckets[name]
            bucket.leak(now)
            bucket.lent -= account.unspent
            bucket.level += account.unspent

    def _expire(self, now: float) -> None:
        for number in [number for number, lease in self._leases.items() if lease.until < now]:
            self._write_off(self._leases.pop(number), now)

    def levels(self, now: float) -> dict[str, dict[str, float]]:
        """For people: of each bucket its depth, what is used of it and what is lent out."""
        return {
            name: {"depth": bucket.quota.depth, "used": round(bucket.leak(now), 1), "lent": bucket.lent}
            for name, bucket in self._buckets.items()
        }


# -- the holder


class Holding:
    """One bucket as a balancer has it: what is lent to it, and a `safe` part that is its own, whoever is reached.

    `used` since the last exchange and `want` tell how much to ask for; `waiting` is what requests wait for, `open` how
    many reservations are not settled. `free` is what was left of the limit at `told_at`; `soon`: see Grant.
    """

    __slots__ = (
        "free", "granted", "name", "open", "owed", "quota", "refunded", "returned", "safe", "soon", "spent", "told_at",
        "used", "waiting", "want",
    )  # fmt: skip

    def __init__(self, name: str, quota: Quota, safe: Quota | None, now: float) -> None:
        self.name = name
        self.used = self.want = self.open = self.waiting = 0
        self.free, self.told_at, self.soon = 0.0, -inf, False
        self.resize(quota, safe, now)
        self.void()

    def resize(self, quota: Quota, safe: Quota | None, now: float) -> None:
        """Of other sizes from now on. A safe part begins full: what one of our name spent before is not known."""
        self.quota, self.safe = quota, None if safe is None else Bucket(safe, now, safe.depth)

    def void(self) -> None:
        """Nothing is lent any more; totals begin anew."""
        self.granted = self.spent = self.returned = self.refunded = self.owed = 0

    @property
    def available(self) -> int:
        """What is lent and not spent."""
        return self.granted - self.spent - self.returned

    def fits(self, n: int, now: float) -> bool:
        """Whether n may be taken."""
        return n <= self.granted - self.spent - self.returned or (self.safe is not None and self.safe.fits(n, now))

    def take(self, n: int) -> bool:
        """Take n, which fits. Whether it was of what is lent."""
        self.used += n
        self.open += 1
        if n <= self.granted - self.spent - self.returned:
            self.spent += n
            return True
        assert self.safe is not None  # it fits
        self.safe.level += n
        return False

    def settle(self, taken: int, used: int, lent: bool, now: float) -> None:
        """What was taken came to so much in the end."""
        self.open -= 1
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
        """Seconds until the root may have n for us, as far as it told; 0 if it may have it now."""
        if self.soon:
            return 0.0
        lacking = n - self.available - self.free
        if lacking <= 0:
            return 0.0
        return max(0.0, self.told_at + lacking / self.quota.rate - now) if self.quota.rate else inf

    def ask(self) -> Want | None:
        """What to tell its root now; None: nothing, and nothing is wanted. What is more than wanted is returned."""
        self.want = want = min(max(2 * self.used, self.want // 2, self.waiting), floor(self.quota.depth))
        self.used = 0
        self.returned += max(0, self.available - want)
        if not (want or self.open or self.spent or self.returned or self.refunded or self.owed):
            return None
        return Want(self.name, self.spent, self.returned, self.refunded, self.owed, want, self.waiting)

    def told(self, grant: Grant, now: float) -> None:
        """Take its root's answer to the last ask."""
        self.granted, self.free = max(self.granted, grant.granted), grant.free
        self.soon, self.told_at = grant.soon, now


class Holder:
    """All that a balancer has of one root. `asked` and `told` enclose an exchange; only one is under way at a time."""

    def __init__(self) -> None:
        self.holdings: dict[str, Holding] = {}
        self._lease, self._until = 0, -inf

    def alive(self, now: float) -> bool:
        """Whether what is lent may be spent. What may not is given up, for good."""
        if now <= self._until:
            return True
        if self._lease:
            self.void()
        return False

    def void(self) -> None:
        """Give up what is lent."""
        self._lease, self._until = 0, -inf
        for holding in self.holdings.values():
            holding.void()

    def asked(self, now: float) -> tuple[int, tuple[Want, ...]]:
        """The lease and what to tell. () if there is nothing to tell or want."""
        self.alive(now)
        wants = (holding.ask() for holding in self.holdings.values())
        return self._lease, tuple(want for want in wants if want is not None)

    def told(self, told: Told, lease: int, asked_at: float, now: float) -> None:
        """Take the answer to what was asked at `asked_at` under a lease: from then on it counts. What was given up
        since does not come back."""
        self.alive(now)
        if lease != self._lease or now > asked_at + LEASE_S:
            return
        if told.lease != self._lease:
            self.void()
            self._lease = told.lease
        self._until = asked_at + LEASE_S
        for grant in told.grants:
            holding = self.holdings.get(grant.bucket)
            if holding is not None:
                holding.told(grant, now)
