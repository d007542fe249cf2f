"""The root of tenants' limits: it lends what its buckets hold, under leases. See quota.py for the rules.

Never lends beyond the mark written to etcd, from which a successor starts. Pure: no IO, no clock.
"""

from __future__ import annotations

from math import ceil, floor, inf

from farhop.balance.quota import DRIFT, EACH, LEASE_S, LOST_S, Bucket, Grant, LeaseReply, LeaseRequest, Quota, Want

# What a root may lend beyond its level when it wrote that down, whichever is most: of depth, of time, in units.
AHEAD_SHARE, AHEAD_S, AHEAD_MIN = 0.02, 60.0, 4.0
WAITED_SHARE = 0.1  # of depth: the most lent ahead for waiting requests, so that few writes serve a large one
SLOTS_AHEAD_SHARE = 0.1  # as AHEAD_SHARE, of slots: a successor soon learns how many of them are held
POOL_S = 10.0  # of a pool's rates: how much unused is kept for later requests; a few exchanges
POOL_LOOK_S = 0.25  # between two looks at what is unused
USERS_MAX = 32_768
MARKS_MAX = 8192  # of buckets that are no more
_SCALE_MIN = 1e-100
MARK_MAX = 2**53  # whatever holders say, what is written down stays a number that every reader keeps


class _Account:
    """One bucket under one lease: a holder's totals, counted from its first message under this lease."""

    __slots__ = ("granted", "owed", "refunded", "returned", "spent")

    def __init__(self, want: Want) -> None:
        self.granted, self.spent, self.returned = want.spent + want.returned, want.spent, want.returned
        self.refunded, self.owed = want.refunded, want.owed

    @property
    def unspent(self) -> int:
        return self.granted - self.spent - self.returned


class _Lease:
    """A holder's lease. `place`: the holder's tier and region, which its certificate proves."""

    __slots__ = ("accounts", "holder", "id", "number", "place", "until")

    def __init__(self, number: int, holder: str) -> None:
        self.id, self.holder, self.until, self.number = number, holder, -inf, 0
        self.place = holder.partition("/")[0]
        self.accounts: dict[str, _Account] = {}


class _Pool:
    """The units that a pool's buckets did not need, and that were not borrowed yet: `spare`, at most POOL_S of their
    rates.
    """

    __slots__ = ("looked_at", "members", "most", "spare")

    def __init__(self, spare: float) -> None:
        self.members: list[_Lent] = []
        self.spare, self.most, self.looked_at = spare, 0.0, -inf

    def look(self, now: float) -> None:
        """Collect the units that idled until now. At most every POOL_LOOK_S; `spare` never exceeds its bound."""
        if now - self.looked_at >= POOL_LOOK_S:
            self.looked_at = now
            for bucket in self.members:
                bucket.leak(now)
        self.spare = min(self.spare, self.most)


class _Lent(Bucket):
    """A bucket at its root: `lent` is unspent elsewhere, `mark` what a successor takes for its level, `next` that of
    the snapshot that is being written. `reported` is the part of its level that holders reported as spent: the rest
    may be unspent elsewhere, and nothing is given back of that. Each place is given back of its own part alone
    (`_parts`, each times `_scale`): one that lies about it frees nothing of what others spent. `waited`: what requests
    waited for at one holder, at most, since the last snapshot. `borrowed` of its pool, in all."""

    __slots__ = ("_parts", "_scale", "borrowed", "lent", "mark", "next", "pool", "reported", "waited")

    def __init__(self, quota: Quota, now: float, level: float = 0.0, mark: float = 0.0) -> None:
        super().__init__(quota, now, level)
        self.lent, self.mark, self.next, self.reported = 0, mark, ceil(min(mark, quota.depth)), 0.0
        self._parts, self._scale = dict[str, float](), 1.0
        self.waited = 0
        self.pool: _Pool | None = None
        self.borrowed = 0.0

    def leak(self, now: float) -> float:
        before, since = self.level, self.at
        if (gone := before - super().leak(now)) > 0.0:  # below 0 where what is borrowed left less than nothing
            self._gone(gone)
        if self.pool is not None:
            self.pool.spare += max(0.0, (self.at - since) * self.quota.rate - before)
        return self.level

    def _gone(self, n: float) -> None:
        """Remove `n` units of what was reported; each place's part shrinks by the same factor."""
        left = self.reported - n
        if left <= 0.0:
            self.reported, self._scale = 0.0, 1.0
            self._parts.clear()
            return
        self._scale *= left / self.reported
        self.reported = left
        if self._scale < _SCALE_MIN:
            self._parts = {place: part * self._scale for place, part in self._parts.items()}
            self._scale = 1.0

    def report(self, n: int, place: str) -> None:
        """The holder reports that it spent `n` units."""
        self.level += n
        self.reported += n
        self._parts[place] = self._parts.get(place, 0.0) + n / self._scale

    def spare(self, now: float) -> float:
        """What may be borrowed for it now: once all of it is lent, as much as was spent of it and has not leaked."""
        if self.pool is None or self.mark < self.quota.depth:
            return 0.0
        self.pool.look(now)
        return min(self.pool.spare, self.level)

    def borrow(self, n: float) -> None:
        """Take `n` spare units of the bucket's pool: that many units of the bucket are free again."""
        assert self.pool is not None
        self.pool.spare -= n
        self.level -= n
        self._gone(n)
        self.borrowed += n

    def refund(self, n: int, place: str, now: float) -> None:
        """Give n back, as far as that was reported as spent there and has not leaked."""
        self.leak(now)
        part = self._parts.get(place, 0.0) * self._scale
        n_reported = min(float(n), part, self.reported)
        if n_reported:
            self._parts[place] = max(0.0, part - n_reported) / self._scale
            self.reported -= n_reported
            self.give(n_reported, now)

    def free(self, now: float) -> float:
        return min(self.quota.depth, self.mark) - self.leak(now) - self.lent

    @property
    def ahead(self) -> float:
        return max(self.quota.depth * AHEAD_SHARE, self.quota.rate * AHEAD_S, AHEAD_MIN)

    def ahead_of(self, now: float) -> int:
        """The next mark to be written to etcd."""
        ahead = max(self.ahead, min(self.waited, self.quota.depth * WAITED_SHARE))
        self.waited = 0
        level = self.leak(now)  # above the depth where more was used than taken: a successor is owed that, too
        return ceil(max(level, min(self.quota.depth, level + self.lent + ahead)))

    @property
    def runs_out(self) -> bool:
        """Whether half of what may be lent ahead is lent, and there could be more."""
        return self.mark < self.quota.depth and self.level + self.lent >= self.mark - self.ahead / 2


class _Slots(_Lent):
    """Slots at their root: `lent` are held. `level` is what a predecessor lent and no holder has reported since; what
    none reports by `forgets_at` is free."""

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
    """What slots one holder has, as its request of this number says: held, and taken of them, by bucket."""

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
        self.pools: dict[str, _Pool] = {}
        self._each: dict[str, Quota] = {}  # of limits for each user
        self._users: dict[str, dict[str, None]] = {}  # their buckets, by limit, the least recently used first
        self._n_users = 0

    def configure(self, quotas: dict[str, Quota], now: float) -> None:
        """Replace all buckets. A bucket whose size changes keeps its level."""
        self._each = {name: quota for name, quota in quotas.items() if name.endswith(EACH)}
        quotas = {name: quota for name, quota in quotas.items() if name not in self._each}
        for name in [name for of in self._users.values() for name in of]:
            each = self._each.get(name.rpartition(EACH)[0] + EACH)
            if each is None:
                self._forget(name)
            else:
                quotas[name] = each
        for name in self._buckets.keys() - quotas.keys():
            bucket = self._buckets[name]
            self._forget(name)
            mark = max(bucket.mark, bucket.next)
            # It may come again: as used up at most, so that an operator can end a debt.
            self._marks[name] = ceil(mark if bucket.quota.slots else min(mark, bucket.quota.depth))
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
        self._pool()

    def _pool(self) -> None:
        """Assign buckets to their pools."""
        before, self.pools = self.pools, {}
        for bucket in self._buckets.values():
            name = bucket.quota.pool
            if not name:
                bucket.pool = None
                continue
            pool = self.pools.get(name)
            if pool is None:
                pool = self.pools[name] = _Pool(before[name].spare if name in before else 0.0)
            pool.members.append(bucket)
            pool.most += POOL_S * bucket.quota.rate
            bucket.pool = pool

    def _forget(self, name: str) -> None:
        del self._buckets[name]
        if EACH in name:
            limit = name.rpartition(EACH)[0]
            del self._users[limit][name]
            self._n_users -= 1
            if not self._users[limit]:
                del self._users[limit]
        for lease in self._leases.values():
            lease.accounts.pop(name, None)
        for tenure in self._tenures.values():
            tenure.slots.pop(name, None)

    def _bucket(self, name: str, now: float) -> _Lent | None:
        """A bucket; a user's bucket is made when it is needed, and remembered as used now."""
        known = self._buckets.get(name)
        if EACH not in name:
            return known
        limit, _, user = name.rpartition(EACH)
        if known is not None:
            del self._users[limit][name]
        else:
            quota = self._each.get(limit + EACH)
            if quota is None or not user:
                return None
            if self._n_users >= USERS_MAX:
                self._forget(self._gives_way(limit))
            known = self._buckets[name] = (_Slots if quota.slots else _Lent)(quota, now, 0.0, inf)
            self._n_users += 1
        self._users.setdefault(limit, {})[name] = None
        return known

    def _gives_way(self, limit: str) -> str:
        """The bucket in whose place another user's of this limit comes: the least recently used, of this limit if it
        has its part of them, else of that with the most. So no tenant's users, however many, evict another's."""
        of = self._users.get(limit, {})
        if len(of) < USERS_MAX // len(self._each):
            of = max(self._users.values(), key=len)
        return next(iter(of))

    def snapshot(self, now: float) -> dict[str, int]:
        """The marks to write down. Until `written` it lends within these and the ones before."""
        self._expire(now)
        marks = dict(self._marks)
        for name, bucket in self._buckets.items():
            if bucket.mark < inf:
                marks[name] = bucket.next = min(bucket.ahead_of(now), MARK_MAX)
                bucket.mark = min(bucket.mark, bucket.next)
        return marks

    def written(self) -> None:
        """The last snapshot was stored in etcd."""
        self.runs_out = False
        for bucket in self._buckets.values():
            if bucket.mark < inf:  # else it is not written down
                bucket.mark = bucket.next

    def leases_of(self, place: str, now: float) -> int:
        """The number of live leases of holders whose names begin with this prefix."""
        return sum(lease.until >= now and lease.holder.startswith(place) for lease in self._leases.values())

    def knows(self, holder: str, lease: int) -> bool:
        """Whether a request of this holder under this lease goes on from one before."""
        known = self._leases.get(lease)
        return known is not None and known.holder == holder

    def exchange(self, holder: str, request: LeaseRequest, now: float) -> LeaseReply:
        """Take a holder's message, and lend. `holder` is a new name for each start of its process."""
        self._expire(now)
        known, fresh = self._leases.get(request.lease), False
        if known is not None and known.holder == holder and 0 < request.number <= known.number:
            return LeaseReply(known.id)  # it comes late, or twice
        if known is None or known.holder != holder:
            known, fresh = _Lease(self._next_lease, holder), True
            self._leases[self._next_lease] = known
            self._next_lease += 1
        known.until, known.number = now + LEASE_S * (1 + DRIFT), request.number
        tenure = self._tenures.get(holder)
        grants = []
        for want in request.wants:
            bucket = self._bucket(want.bucket, now)
            if isinstance(bucket, _Slots):
                if tenure is None:
                    tenure = self._tenures[holder] = _Tenure()
                if request.number > tenure.number:
                    grants.append(self._hold(tenure, bucket, want, now))
            elif bucket is not None:
                unspent = Want(want.bucket, wanted=want.wanted, least=want.least) if fresh else want
                grants.append(self._lend(known, unspent, now, request.number > 0))
        if request.number:
            for name in known.accounts.keys() - {want.bucket for want in request.wants}:
                self._write_off(name, known.accounts.pop(name), now)
        if tenure is not None and request.number > tenure.number:
            tenure.number, tenure.until = request.number, now + (LEASE_S + LOST_S) * (1 + DRIFT)
            for name in tenure.slots.keys() - {want.bucket for want in request.wants}:
                self._buckets[name].lent -= tenure.slots.pop(name)[0]
        return LeaseReply(known.id, tuple(grants))

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
        spent = min(spent, account.unspent)  # what was not lent cannot be spent or returned
        returned = min(returned, account.unspent - spent)
        bucket.lent -= spent + returned
        if spent or owed:
            bucket.report(spent + owed, lease.place)
        account.spent += spent
        account.returned += returned
        account.owed += owed
        account.refunded += refunded
        if refunded:
            bucket.refund(refunded, lease.place, now)
        own = bucket.free(now)
        lacking = max(0, want.wanted - account.unspent)
        spare = bucket.spare(now) if lacking > own else 0.0
        free = own + spare
        # Half of what is left, so that the next finds some; but what waits is served if it can be.
        more = max(0, min(lacking, floor(free), max(want.least - account.unspent, floor(free / 2))))
        if more and more > own:  # `own` is below 0 where more was used than there is: that alone is nobody's to lend
            bucket.borrow(more - own)
        account.granted += more
        bucket.lent += more
        bucket.waited = max(bucket.waited, want.least)
        soon = bucket.runs_out
        self.runs_out |= soon
        # Of the whole limit, which is what clients are shown: a holder that asks for more than is recorded gets `soon`.
        # Below 0 if more was used than there is, or nothing leaks yet: until then no holder need ask again.
        left = bucket.quota.depth - bucket.level - bucket.lent + bucket.spare(now)
        left -= max(0.0, bucket.at - now) * bucket.quota.rate
        return Grant(want.bucket, account.granted, max(-float(MARK_MAX), left), soon)

    def _write_off(self, name: str, account: _Account, now: float) -> None:
        """Count as spent what the holder may have spent without reporting it."""
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
        """For operators: by bucket, its depth, the units used and the units lent."""
        taken: dict[str, int] = {}
        for tenure in self._tenures.values():
            for name, (_, n) in tenure.slots.items():
                taken[name] = taken.get(name, 0) + n
        return {
            name: {
                "depth": bucket.quota.depth,
                "used": round(bucket.leak(now) + taken.get(name, 0), 1),
                "lent": bucket.lent - taken.get(name, 0),
                **({"borrowed": round(bucket.borrowed, 1)} if bucket.pool is not None else {}),
            }
            for name, bucket in self._buckets.items()
        }
