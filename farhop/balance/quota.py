"""What tenants may use over a whole fleet: buckets at one root, lent out in leases, and taken from locally.

A limit of N units per period is a bucket (GCRA: ITU-T I.371; RFC 2697's token bucket) of depth N that leaks N per
period. Its root lends units to holders, the balancers that clients come to; a unit leaks only once it was spent.
Invariants: what is spent, whoever spends it, is within depth + rate x time + what was given back, for every interval;
so under lost, late and doubled messages, crashes of anybody, and moves of the root. A holder does not spend after
LEASE_S without an answer; what a root lost sight of counts as spent; a root never lends beyond the mark that its
successor will begin from. Pure: no IO, no clock (`now` is each side's own monotonic seconds).

A limit of N under way at once is N slots, lent out alike, and never spent: a holder takes one and lets it go. Told are
not totals but what a holder has now, in asks that are numbered, so that a new root learns it from the holders. Never
are more than N under way, but for those whose holder was silent for LOST_S after its lease ended.

A bucket for each user is one whose name ends with EACH: USERS_MAX of them are known, of which the least recently used
is forgotten and begins anew; so do all of them with a new root.
"""

from __future__ import annotations

from math import ceil, floor, inf

import msgspec

LEASE_S = 10.0
DRIFT = 0.01  # how much one clock may run faster than another: a hundred times what quartz does
# What a root may lend beyond its level when it wrote that down, whichever is most: of depth, of time, in units.
AHEAD_SHARE, AHEAD_S, AHEAD_MIN = 0.02, 60.0, 4.0
WAITED_SHARE = 0.1  # of depth: at most so much ahead for what requests wait for, so that few writings serve a large one

LOST_S = 60.0  # how long what is under way still counts, after its holder's lease ended: it may work, or be dead
SLOTS_AHEAD_SHARE = 0.1  # as AHEAD_SHARE, of slots: a successor soon learns what of it is true

# What a client is told to wait for a slot is what passes between two that end here: at first, at most, and how fast it
# is learned.
PACE_S, PACE_S_MAX, PACE_WEIGHT = 1.0, 10.0, 0.1

EACH = "\x1f"  # between the name of a limit for each user and whom it is for
USERS_MAX = 32_768
MARKS_MAX = 8192  # of buckets that are no more


class Quota(msgspec.Struct, frozen=True):
    """A bucket's size: `depth` in units, `rate` in units per second; with a rate of 0 its units are slots."""

    depth: float
    rate: float

    @property
    def slots(self) -> bool:
        """Whether its units are held while something is under way, and not spent."""
        return self.rate == 0.0

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
    `wanted`: what it would like to have unspent; `least`: what requests wait for now. Of slots: it has `held`, of which
    `spent` are taken and `owed` may have been given up for lost, and all else it had is let go; `wanted` and `least`
    are those beyond.
    """

    bucket: str
    spent: int = 0
    returned: int = 0
    refunded: int = 0
    owed: int = 0
    wanted: int = 0
    least: int = 0
    held: int = 0


class Ask(msgspec.Struct, frozen=True):
    """What a holder tells at `at`, by its clock, under a lease. `number` rises. Slots that are not named are let go."""

    lease: int
    number: int
    wants: tuple[Want, ...]
    at: float


class Grant(msgspec.Struct, frozen=True):
    """A root's word: `granted` since the lease began, or the slots that are held from now on; `free`: what is left of
    the limit, of slots below 0 where more are held than there are; `soon`: that it lends more of it once it has written
    down that it may."""

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
    """Of one bucket under one lease, from what a holder told before, of which all has been counted, on."""

    __slots__ = ("granted", "owed", "refunded", "returned", "spent")

    def __init__(self, want: Want) -> None:
        self.granted, self.spent, self.returned = want.spent + want.returned, want.spent, want.returned
        self.refunded, self.owed = want.refunded, want.owed

    @property
    def unspent(self) -> int:
        return self.granted - self.spent - self.returned


class _Lease:
    __slots__ = ("accounts", "holder", "id", "number", "until")

    def __init__(self, number: int, holder: str) -> None:
        self.id, self.holder, self.until, self.number = number, holder, -inf, 0
        self.accounts: dict[str, _Account] = {}


class _Lent(Bucket):
    """A bucket at its root: `lent` is unspent elsewhere, `mark` what a successor takes for its level, `next` that of
    the snapshot that is being written. `told` is the part of its level that holders told they spent: the rest may be
    unspent elsewhere, and nothing is given back of that. `waited`: what requests waited for at one holder, at most,
    since the last snapshot."""

    __slots__ = ("lent", "mark", "next", "told", "waited")

    def __init__(self, quota: Quota, now: float, level: float = 0.0, mark: float = 0.0) -> None:
        super().__init__(quota, now, level)
        self.lent, self.mark, self.next, self.told = 0, mark, ceil(min(mark, quota.depth)), 0.0
        self.waited = 0

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

    def ahead_of(self, now: float) -> int:
        """Its next mark."""
        ahead = max(self.ahead, min(self.waited, self.quota.depth * WAITED_SHARE))
        self.waited = 0
        return ceil(min(self.quota.depth, self.leak(now) + self.lent + ahead))

    @property
    def runs_out(self) -> bool:
        """Whether half of what may be lent ahead is lent, and there could be more."""
        return self.mark < self.quota.depth and self.level + self.lent >= self.mark - self.ahead / 2


class _Slots(_Lent):
    """Slots at their root: `lent` are held. `level` is what a predecessor lent and nobody told to hold since; what
    nobody told of until `forgets_at` is over."""

    __slots__ = ("forgets_at",)

    def __init__(self, quota: Quota, now: float, level: float = 0.0, mark: float = 0.0) -> None:
        super().__init__(quota, now, level, mark)
        self.forgets_at = now + (LEASE_S + LOST_S) * (1 + DRIFT)

    def leak(self, now: float) -> float:
        if now > self.forgets_at:
            self.level = 0.0
        return self.level

    @property
    def ahead(self) -> float:
        return max(self.quota.depth * SLOTS_AHEAD_SHARE, AHEAD_MIN)

    def ahead_of(self, now: float) -> int:
        return max(super().ahead_of(now), ceil(self.level + self.lent))  # more may be held than there are


class _Tenure:
    """What slots one holder has, as it told in its ask of this number: held, and taken of them, by bucket."""

    __slots__ = ("number", "slots", "until")

    def __init__(self) -> None:
        self.number, self.until = 0, -inf
        self.slots: dict[str, tuple[int, int]] = {}


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
        self._tenures: dict[str, _Tenure] = {}  # by holder
        self._each: dict[str, Quota] = {}  # of limits for each user
        self._users: dict[str, None] = {}  # their buckets, the least recently used first

    def configure(self, quotas: dict[str, Quota], now: float) -> None:
        """These are all the buckets from now on; one whose size changes keeps its level."""
        self._each = {name: quota for name, quota in quotas.items() if name.endswith(EACH)}
        quotas = {name: quota for name, quota in quotas.items() if name not in self._each}
        for name in tuple(self._users):
            each = self._each.get(name.rpartition(EACH)[0] + EACH)
            if each is None:
                self._forget(name)
            else:
                quotas[name] = each
        for name in self._buckets.keys() - quotas.keys():
            bucket = self._buckets[name]
            self._forget(name)
            self._marks[name] = ceil(max(bucket.mark, bucket.next))  # it may come again
            if len(self._marks) > MARKS_MAX:
                del self._marks[next(iter(self._marks))]
        for name, quota in quotas.items():
            known = self._buckets.get(name)
            if known is not None:
                known.leak(now)
                known.quota = quota
                continue
            level, kind = self._marks.pop(name, None), _Slots if quota.slots else _Lent
            if level is None:
                self._buckets[name] = kind(quota, now)
            else:
                from_s = now if quota.slots else max(now, self._leaks_from)
                self._buckets[name] = kind(quota, from_s, float(level), float(level))

    def _forget(self, name: str) -> None:
        del self._buckets[name]
        self._users.pop(name, None)
        for lease in self._leases.values():
            lease.accounts.pop(name, None)
        for tenure in self._tenures.values():
            tenure.slots.pop(name, None)

    def _bucket(self, name: str, now: float) -> _Lent | None:
        """A bucket; that of a user is made, or remembered as used now."""
        known = self._buckets.get(name)
        if EACH not in name:
            return known
        if known is not None:
            del self._users[name]
        else:
            limit, _, user = name.rpartition(EACH)
            quota = self._each.get(limit + EACH)
            if quota is None or not user:
                return None
            if len(self._users) >= USERS_MAX:
                self._forget(next(iter(self._users)))
            known = self._buckets[name] = (_Slots if quota.slots else _Lent)(quota, now, 0.0, inf)
        self._users[name] = None
        return known

    def snapshot(self, now: float) -> dict[str, int]:
        """The marks to write down. Until `written` it lends within these and the ones before."""
        self._expire(now)
        marks = dict(self._marks)
        for name, bucket in self._buckets.items():
            if bucket.mark < inf:
                marks[name] = bucket.next = bucket.ahead_of(now)
                bucket.mark = min(bucket.mark, bucket.next)
        return marks

    def written(self) -> None:
        """The last snapshot stands."""
        self.runs_out = False
        for bucket in self._buckets.values():
            if bucket.mark < inf:  # else it is not written down
                bucket.mark = bucket.next

    def exchange(self, holder: str, ask: Ask, now: float) -> Told:
        """Take what a holder tells, and lend. `holder` is another for each life of its process."""
        self._expire(now)
        known, fresh = self._leases.get(ask.lease), False
        if known is not None and known.holder == holder and 0 < ask.number <= known.number:
            return Told(known.id)  # it comes late, or twice
        if known is None or known.holder != holder:
            known, fresh = _Lease(self._next_lease, holder), True
            self._leases[self._next_lease] = known
            self._next_lease += 1
        known.until, known.number = now + LEASE_S * (1 + DRIFT), ask.number
        tenure = self._tenures.get(holder)
        grants = []
        for want in ask.wants:
            bucket = self._bucket(want.bucket, now)
            if isinstance(bucket, _Slots):
                if tenure is None:
                    tenure = self._tenures[holder] = _Tenure()
                if ask.number > tenure.number:
                    grants.append(self._hold(tenure, bucket, want, now))
            elif bucket is not None:
                told = Want(want.bucket, wanted=want.wanted, least=want.least) if fresh else want
                grants.append(self._lend(known, told, now, ask.number > 0))
        if ask.number:
            for name in known.accounts.keys() - {want.bucket for want in ask.wants}:
                self._write_off(name, known.accounts.pop(name), now)
        if tenure is not None and ask.number > tenure.number:
            tenure.number, tenure.until = ask.number, now + (LEASE_S + LOST_S) * (1 + DRIFT)
            for name in tenure.slots.keys() - {want.bucket for want in ask.wants}:
                self._buckets[name].lent -= tenure.slots.pop(name)[0]
        return Told(known.id, tuple(grants))

    def _hold(self, tenure: _Tenure, slots: _Slots, want: Want, now: float) -> Grant:
        more = want.held - tenure.slots.get(want.bucket, (0, 0))[0]
        # What it has more than we know of, a predecessor of ours lent to it, and counts in `level`, if it was not lost.
        slots.level = max(0.0, slots.leak(now) - max(0, more - want.owed))
        slots.lent += more
        free = slots.free(now)
        lent = max(0, min(want.wanted, floor(free), max(want.least, floor(free / 2))))
        slots.lent += lent
        tenure.slots[want.bucket] = want.held + lent, want.spent
        self.runs_out |= slots.runs_out
        left = slots.quota.depth - slots.level - slots.lent
        return Grant(want.bucket, want.held + lent, left, slots.runs_out)

    def _lend(self, lease: _Lease, want: Want, now: float, numbered: bool) -> Grant:
        bucket = self._buckets[want.bucket]
        account = lease.accounts.get(want.bucket)
        if account is None or (numbered and want.spent + want.returned < account.spent + account.returned):
            if account is not None:  # the holder forgot it meanwhile, and begins anew
                self._write_off(want.bucket, account, now)
            account = lease.accounts[want.bucket] = _Account(want)
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
        bucket.waited = max(bucket.waited, want.least)
        soon = bucket.runs_out
        self.runs_out |= soon
        # Of the whole limit, which is what clients are told: who asks for more than is written down finds `soon`.
        left = bucket.quota.depth - bucket.level - bucket.lent
        return Grant(want.bucket, account.granted, max(0.0, left), soon)

    def _write_off(self, name: str, account: _Account, now: float) -> None:
        """What was not told of may be spent."""
        bucket = self._buckets[name]
        bucket.leak(now)
        bucket.lent -= account.unspent
        bucket.level += account.unspent

    def _expire(self, now: float) -> None:
        for number in [number for number, lease in self._leases.items() if lease.until < now]:
            for name, account in self._leases.pop(number).accounts.items():
                self._write_off(name, account, now)
        for holder in [holder for holder, tenure in self._tenures.items() if tenure.until < now]:
            for name, (held, _) in self._tenures.pop(holder).slots.items():
                self._buckets[name].lent -= held

    def levels(self, now: float) -> dict[str, dict[str, float]]:
        """For people: of each bucket its depth, what is used of it and what is lent out."""
        taken: dict[str, int] = {}
        for tenure in self._tenures.values():
            for name, (_, n) in tenure.slots.items():
                taken[name] = taken.get(name, 0) + n
        return {
            name: {
                "depth": bucket.quota.depth,
                "used": round(bucket.leak(now) + taken.get(name, 0), 1),
                "lent": bucket.lent - taken.get(name, 0),
            }
            for name, bucket in self._buckets.items()
        }


# -- the holder


class Holding:
    """One bucket as a balancer has it: what is lent to it, and a `safe` part that is its own, whoever is reached.

    `used` since the last exchange and `want` tell how much to ask for; `waiting` is what requests wait for, `open` how
    many reservations are not settled. `free` is what was left of the limit at `told_at`; `soon`: see Grant. `known`:
    there may be something that its root was not told; else it is not named, and its root forgets our totals.
    """

    __slots__ = (
        "asked", "free", "granted", "known", "name", "open", "owed", "quota", "refunded", "returned", "safe", "soon",
        "spent", "told_at", "used", "waiting", "want",
    )  # fmt: skip

    def __init__(self, name: str, quota: Quota, safe: Quota | None, now: float) -> None:
        self.name = name
        self.used = self.want = self.open = self.waiting = 0
        self.free, self.soon, self.known, self.asked = 0.0, False, False, 0
        self.resize(quota, safe, now)
        self.void()

    def resize(self, quota: Quota, safe: Quota | None, now: float) -> None:
        """Of other sizes from now on. A safe part begins full: what one of our name spent before is not known."""
        self.quota, self.safe = quota, None if safe is None else Bucket(safe, now, safe.depth)
        self.told_at = -inf  # what was left then was of another size

    def void(self) -> None:
        """Nothing is lent any more; totals begin anew."""
        self.granted = self.spent = self.returned = self.refunded = self.owed = 0

    @property
    def available(self) -> int:
        """What is lent and not spent."""
        return self.granted - self.spent - self.returned

    @property
    def idle(self) -> bool:
        """Whether it can be forgotten: nothing is lent or under way, and its root was told all."""
        return not (self.known or self.open or self.waiting or self.available)

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
        """Seconds until the root may have n for us, as far as it told; 0 if it may have it now."""
        if self.soon:
            return 0.0
        lacking = n - self.available - self.free
        if lacking <= 0:
            return 0.0
        return max(0.0, self.told_at + lacking / self.quota.rate - now) if self.quota.rate else inf

    @property
    def _totals(self) -> int:
        return self.spent + self.returned + self.refunded + self.owed  # each only rises

    def ask(self) -> Want | None:
        """What to tell its root now; None: nothing, and nothing is wanted. What is more than wanted is returned."""
        self.want = want = min(max(2 * self.used, self.want // 2, self.waiting), floor(self.quota.depth))
        self.used = 0
        self.returned += max(0, self.available - want)
        if not (want or self.open or self.known):
            return None
        self.known, self.asked = True, self._totals
        return Want(self.name, self.spent, self.returned, self.refunded, self.owed, want, self.waiting)

    def leave(self) -> None:
        """Nothing more is wanted."""
        self.used = self.want = self.waiting = 0

    def told(self, grant: Grant, now: float) -> None:
        """Take its root's answer to the last ask."""
        self.granted, self.free = max(self.granted, grant.granted), grant.free
        self.known = bool(self.want or self.open or self.available) or self.asked != self._totals
        self.soon, self.told_at = grant.soon, now


class SlotsHeld(Holding):
    """Slots as a balancer has them: `held`, of which `taken` are under way, `most` at once since the last ask. So many
    are `over` that are let go when they end. `own` are taken of its safe part, which may be used from `own_from` on.
    `pace_s`: between two that end here, of late. `known`: its root may think that we have some; `lost`: or that we have
    none any more."""

    __slots__ = ("ended_at", "held", "lost", "most", "over", "own", "own_from", "pace_s", "taken")

    def __init__(self, name: str, quota: Quota, safe: Quota | None, now: float) -> None:
        self.held = self.taken = self.most = self.over = self.own = 0
        self.lost, self.pace_s, self.ended_at = False, PACE_S, now
        super().__init__(name, quota, safe, now)

    def resize(self, quota: Quota, safe: Quota | None, now: float) -> None:
        """Of other sizes from now on. What is ours from now on others may have until their leases are over."""
        super().resize(quota, safe, now)
        self.void()
        self.own_from = now + LEASE_S * (1 + DRIFT)

    def void(self) -> None:
        """None are lent any more, but for those that are taken, until they end."""
        self.held = self.over = self.taken

    @property
    def available(self) -> int:
        """How many are held and not taken."""
        return self.held - self.taken

    @property
    def idle(self) -> bool:
        """Whether it can be forgotten."""
        return not (self.known or self.held or self.own or self.waiting)

    def fits(self, n: int, now: float) -> bool:
        """Whether n may be taken."""
        if n <= self.held - self.taken:
            return True
        return self.safe is not None and now >= self.own_from and self.own + n <= self.safe.quota.depth

    def take(self, n: int) -> bool:
        """Take n, which fits. Whether it was of what is lent."""
        if n > self.held - self.taken:
            self.own += n
            return False
        self.taken += n
        if self.taken > self.most:
            self.most = self.taken
        return True

    def settle(self, taken: int, used: int, lent: bool, now: float) -> None:  # noqa: ARG002 - what was taken is free
        """What was taken is over."""
        if lent:
            self.taken -= taken
            if self.over:
                self.held -= taken
                self.over -= taken
        else:
            self.own -= taken
        self.pace_s += PACE_WEIGHT * (min(max(0.0, now - self.ended_at), PACE_S_MAX) - self.pace_s)
        self.ended_at = now

    def lacks_s(self, n: int, now: float) -> float:
        """Seconds until another may have ended, 0 if the root may have n for us now."""
        if self.soon or n <= self.available + self.free:
            return 0.0
        return max(0.0, self.told_at + self.pace_s - now)

    def ask(self) -> Want | None:
        """What to tell its root now; None: nothing, and nothing is wanted. What is more than wanted is let go."""
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
        """Nothing more is wanted."""
        super().leave()
        self.most = self.taken

    def told(self, grant: Grant, now: float) -> None:
        """Take its root's answer to the last ask."""
        self.held, self.known = grant.granted, grant.granted > 0
        self.over, self.lost = 0, False
        if grant.free < 0:  # a limit that is a lower one now, or somebody who was given up for lost is back
            left = self.held + floor(grant.free)
            self.held, self.over = max(self.taken, left), max(0, self.taken - left)
        self.free, self.soon, self.told_at = max(0.0, grant.free), grant.soon, now


def new_holding(name: str, quota: Quota, safe: Quota | None, now: float) -> Holding:
    """A bucket as a balancer has it, that has nothing of it yet."""
    return (SlotsHeld if quota.slots else Holding)(name, quota, safe, now)


class Holder:
    """All that a balancer has of one root. `asked` and `told` enclose an exchange; only one is under way at a time."""

    def __init__(self) -> None:
        self.holdings: dict[str, Holding] = {}
        self._lease, self._until, self._number = 0, -inf, 0
        self._ended = -inf  # the last lease, where there is none

    def alive(self, now: float) -> bool:
        """Whether what is lent may be spent. What may not is given up, for good."""
        if now <= self._until:
            return True
        if self._lease:
            self.void()
        return False

    def void(self) -> None:
        """Give up what is lent."""
        self._lease, self._until, self._ended = 0, -inf, self._until
        for one in self.holdings.values():
            one.void()

    def asked(self, now: float) -> Ask:
        """What to tell, if there is something to tell or want."""
        self.alive(now)
        self._number += 1
        if not self._lease and now > self._ended + LOST_S:
            for one in self.holdings.values():
                if isinstance(one, SlotsHeld):
                    one.lost = True
        wants = (one.ask() for one in self.holdings.values())
        return Ask(self._lease, self._number, tuple(want for want in wants if want is not None), now)

    def leaves(self, now: float) -> Ask:
        """The last word of a holder under which nothing is under way any more."""
        for one in self.holdings.values():
            one.leave()
        return self.asked(now)

    def told(self, told: Told, ask: Ask, now: float) -> None:
        """Take the answer to an ask: it counts from when that was made. What was given up since does not come back."""
        self.alive(now)
        if ask.lease != self._lease or ask.number != self._number or now > ask.at + LEASE_S:
            return
        if told.lease != self._lease:
            self.void()
            self._lease = told.lease
        self._until = ask.at + LEASE_S
        for grant in told.grants:
            one = self.holdings.get(grant.bucket)
            if one is not None:
                one.told(grant, now)
