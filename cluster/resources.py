"""What a demand lacks on a cluster: pure arithmetic over resource amounts, by Ray's names (`CPU`, `GPU`, …).

Used before anything is asked of Ray, because Ray waits without a word for what can never come.
"""

from collections.abc import Mapping, Sequence

Amounts = Mapping[str, float]
"""Resource name → amount."""


def total(bundles: Sequence[Amounts]) -> dict[str, float]:
    """The sum of all bundles, by resource."""
    names = sorted({name for bundle in bundles for name in bundle})
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def lacking(asked: Amounts, present: Amounts) -> dict[str, float]:
    """What is missing of what is asked, by resource; empty if all is there."""
    # Ray counts in steps of 1/10000; float sums of fractional cores must not report less than that as missing.
    return {
        name: amount - present.get(name, 0.0)
        for name, amount in asked.items()
        if amount - present.get(name, 0.0) > 1e-4
    }


def misfits(bundles: Sequence[Amounts], nodes: Sequence[Amounts]) -> list[Amounts]:
    """Bundles that no single node could hold even if it were idle: a bundle never spans nodes."""
    return [bundle for bundle in bundles if all(lacking(bundle, node) for node in nodes)]


def rooms(bundles: Sequence[Amounts], free: Sequence[Amounts], most: int) -> int:
    """How often all `bundles` together still fit into what the nodes have free, counted up to `most`.

    Larger bundles are laid first, each on the first node that holds it: a count that can be reached, not always the largest.
    """
    left = [dict(node) for node in free]
    order = sorted(bundles, key=lambda bundle: sorted(bundle.values(), reverse=True), reverse=True)
    for count in range(most):
        for bundle in order:
            node = next((n for n in left if not lacking(bundle, n)), None)
            if node is None:
                return count
            for name, amount in bundle.items():
                node[name] = node.get(name, 0.0) - amount
    return most


def shortage(bundles: Sequence[Amounts], nodes: Sequence[Amounts]) -> str | None:
    """What the whole cluster, idle, lacks for these bundles, as a sentence; None if the amounts suffice."""
    asked, present = total(bundles), total(nodes)
    if missing := lacking(asked, present):
        return (
            f"asked: {amounts(asked)} in {len(bundles)} bundle(s); the cluster has {_of(asked, present)} "
            f"on {len(nodes)} node(s); missing: {amounts(missing)}"
        )
    if unfit := misfits(bundles, nodes):
        largest = "; ".join(sorted({amounts(node) for node in nodes})) or "none"
        return f"a bundle of {amounts(unfit[0])} fits no single node; nodes have: {largest}"
    return None


def amounts(values: Amounts) -> str:
    """`4 CPU, 1 GPU`; resources that Ray adds for itself (node addresses, memory) are left out."""
    shown = [f"{value:g} {name}" for name, value in sorted(values.items()) if _worth_naming(name)]
    return ", ".join(shown) or "nothing"


def _of(asked: Amounts, present: Amounts) -> str:
    return ", ".join(f"{present.get(name, 0.0):g} {name}" for name in sorted(asked))


def _worth_naming(name: str) -> bool:
    return not name.startswith(("node:", "accelerator_type:")) and name not in ("memory", "object_store_memory")
