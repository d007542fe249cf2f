"""What tenants may use over a whole fleet: buckets at one root, lent out in leases, and taken from locally.

Here are the rules for the root (`quota_root`) and its holders (`quota_holder`), and the messages between them.

A limit of N units per period is a bucket (GCRA: ITU-T I.371; RFC 2697's token bucket) of depth N that leaks N per
period. Its root lends units to holders, the balancers that clients come to; a unit leaks only once it was spent.
Invariants: what all holders together spend is within depth + rate x time + what was given back, for every interval,
also under lost, late and doubled messages, crashes of any process, and moves of the root. A holder does not spend after
LEASE_S without an answer; units that a root lost track of count as spent; a root never lends beyond the mark that its
successor will begin from. Pure: no IO, no clock (`now` is each side's own monotonic seconds).

A limit of N requests at once is N slots, lent in the same way, but never spent: a holder takes one and frees it.
Messages carry not totals but what a holder has now, in numbered requests, so that a new root learns it from the
holders. There are never more than N under way, except for those whose holder was silent for LOST_S after its lease
ended.

Buckets of one pool lend each other what is unused: units that would refill a full bucket are spare, for POOL_S at most,
and a used-up bucket takes them as if they had leaked from it. So no bucket has less than its own because of it, and
what a pool spends is within the sums of its depths and rates and POOL_S of those rates.

A bucket for each user is one whose name ends with EACH. USERS_MAX of them are known; the least recently used one, of a
limit that has its part of them, is forgotten and begins full, and so do all of them with a new root.
"""

from __future__ import annotations

from math import inf

import msgspec

LEASE_S = 10.0
DRIFT = 0.01  # how much one clock may run faster than another: a hundred times what quartz does
LOST_S = 60.0  # how long what is under way still counts, after its holder's lease ended: it may work, or be dead
_SHARE_MIN = 1e-9  # of a rate
EACH = "\x1f"  # between the name of a limit for each user and whom it is for


class Quota(msgspec.Struct, frozen=True):
    """A bucket's size: `depth` in units, `rate` in units per second; with a rate of 0 its units are slots. `pool` names
    those that lend each other what idles, "" none: they count the same."""

    depth: float
    rate: float
    pool: str = ""

    @property
    def slots(self) -> bool:
        """Whether its units are held while something is under way, and not spent."""
        return self.rate == 0.0

    def part(self, share: float) -> Quota:
        """A share (0..1) of the quota. Of a bucket, even one that holds nothing is a bucket: it keeps a rate above 0,
        since a rate of 0 would make it slots, and units that are spent would come back with each request's end."""
        return Quota(self.depth * share, self.rate * max(share, _SHARE_MIN), self.pool)


class Bucket:
    """A leaky bucket. `level` is what has not leaked yet; until `at` nothing leaks."""

    __slots__ = ("at", "level", "quota")

    def __init__(self, quota: Quota, now: float, level: float = 0.0) -> None:
        self.quota, self.at, self.level = quota, now, level

    def leak(self, now: float) -> float:
        """The level at `now`. A clock that stops, or steps back, leaks nothing."""
        if now > self.at:
            self.level = max(0.0, self.level - (now - self.at) * self.quota.rate)
            self.at = now
        return self.level

    def fits(self, n: float, now: float) -> bool:
        """Whether the level plus `n` is within the depth."""
        return self.leak(now) + n <= self.quota.depth

    def lacks_s(self, n: float, now: float) -> float:
        """Seconds until n more would be within its depth, if no more come."""
        return max(0.0, self.leak(now) + n - self.quota.depth) / self.quota.rate if n <= self.quota.depth else inf

    def give(self, n: float, now: float) -> None:
        """Take out `n` units that were put in and not used. What has leaked meanwhile stays leaked."""
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


class LeaseRequest(msgspec.Struct, frozen=True):
    """What a holder reports at `at`, by its clock, under a lease. `number` rises with each message. Slots that are not
    named are returned.
    """

    lease: int
    number: int
    wants: tuple[Want, ...]
    at: float


class Grant(msgspec.Struct, frozen=True):
    """A root's answer: `granted` since the lease began, or the slots that are held from now on; `free`: what is left of
    the limit, below 0 if more was used, or is held, than there is, or if nothing leaks yet; `soon`: it will lend more
    once it has recorded in etcd that it may."""

    bucket: str
    granted: int = 0
    free: float = 0.0
    soon: bool = False


class LeaseReply(msgspec.Struct, frozen=True):
    """An answer. With another `lease` than asked with, all totals begin from 0 again."""

    lease: int
    grants: tuple[Grant, ...] = ()
