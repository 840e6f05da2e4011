"""What each rank tells the manager at start, and whether all of them agree."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.connector.proof import Proof, expected_proof
from tiered_kv.errors import IdentityError
from tiered_kv.stats import TierCondition
from tiered_kv.values import CacheGeometry, Fingerprint

__all__ = ["Handshake", "agreed"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Handshake:
    """Worker -> manager, once at start, before the first request."""

    fingerprint: Fingerprint
    geometry: CacheGeometry
    tier_slots: int
    """Host slots of this rank that the manager may give out."""

    proof: Proof | None = None
    """What the rank's start-up self-test found; None where none was run."""
    conditions: tuple[TierCondition, ...] = ()
    """How the rank finds the tiers, as in `WorkerReport.conditions`."""

    def check(self, expected: Fingerprint, others: tuple[Handshake, ...]) -> None:
        """Compare with the manager's fingerprint and with the other ranks.

        Raises:
            IdentityError: the halves, or two ranks, disagree on what a block's bytes are.
        """
        rank = self.geometry.rank
        different = expected.differences(self.fingerprint)
        if different:
            mine, theirs = dict(expected.fields), dict(self.fingerprint.fields)
            detail = "; ".join(
                f"{name}: scheduler {mine.get(name)!r}, rank {rank} {theirs.get(name)!r}"
                for name in different
            )
            raise IdentityError(f"scheduler and worker disagree on what a block holds: {detail}")
        for other in others:
            if other.geometry.groups != self.geometry.groups:
                raise IdentityError(
                    f"ranks {rank} and {other.geometry.rank} have blocks of "
                    f"different shape: {self.geometry.groups} and {other.geometry.groups}"
                )
            if other.tier_slots != self.tier_slots:
                raise IdentityError(
                    f"ranks {rank} and {other.geometry.rank} have "
                    f"{self.tier_slots} and {other.tier_slots} host slots; all ranks must have the "
                    "same host memory"
                )

    def check_proof(self, expected: Fingerprint, geometry: CacheGeometry) -> None:
        """Compare what came back in the rank's self-test with what the manager makes of its own
        fingerprint and geometry. A self-test that could not be completed is no disagreement.

        Raises:
            IdentityError: another block came back.
        """
        rank, proof = self.geometry.rank, self.proof
        if proof is None or proof.problem is not None:
            return
        wanted = expected_proof(expected, geometry, rank)
        if proof.blocks != wanted:
            raise IdentityError(
                f"the start-up self-test of rank {rank} failed: the blocks that it stored and "
                f"loaded back (lengths {[block.length for block in proof.blocks]}) are not what "
                f"the scheduler expects (lengths {[block.length for block in wanted]}); "
                "scheduler and worker disagree on what a block is, or the copies between the "
                "engine and host memory are broken"
            )


def agreed(handshakes: Sequence[Handshake], expected: Fingerprint, world_size: int) -> Handshake:
    """The first rank's handshake, where all ranks have reported once, agree with each other and
    with the manager, and no self-test speaks against it. Logs what the self-tests found.

    Raises:
        IdentityError: they do not agree.
    """
    ranks = sorted(handshake.geometry.rank for handshake in handshakes)
    worlds = {handshake.geometry.world_size for handshake in handshakes}
    if ranks != list(range(world_size)) or worlds != {world_size}:
        raise IdentityError(
            f"the scheduler expects ranks 0 to {world_size - 1} of {world_size}; ranks {ranks} "
            f"reported, which count {sorted(worlds)} ranks"
        )
    first = handshakes[0]
    for handshake in handshakes:
        handshake.check(expected, tuple(handshakes))
    for handshake in handshakes:
        handshake.check_proof(expected, first.geometry)
        _show(handshake)
    return first


def _show(handshake: Handshake) -> None:
    proof, rank = handshake.proof, handshake.geometry.rank
    if proof is None:
        return
    if proof.problem is not None:
        logger.error(
            "self-test of rank %d: %s; what cannot be loaded will be computed", rank, proof.problem
        )
        return
    logger.info(
        "self-test of rank %d: blocks of %s bytes were stored, loaded back and compared in %.1f ms",
        rank,
        ", ".join(str(block.length) for block in proof.blocks),
        proof.seconds * 1000,
    )
