"""The pictures and tables of docs/scaling.md, from the files that `bench_retrieval` and `bench_scaling` wrote.

Only what stands between the page's markers is replaced. `--rows`, `--dim` and the node's options put in other figures than the paper's
corpus; without `--write`, the tables are only printed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cluster.failures import DataError
from scripts.bench.line_chart import Line, line_chart
from scripts.bench.needs import Corpus, Gpu, Kind, Node, Speed
from scripts.bench_retrieval import Benchmark, MethodResult
from scripts.bench_scaling import Scaling
from scripts.terminal import console

ROWS_PICTURE, SHARDS_PICTURE, MEMORY_PICTURE = "scaling-rows.svg", "scaling-shards.svg", "scaling-memory.svg"

PICTURES = {
    ROWS_PICTURE: "Time against rows",
    SHARDS_PICTURE: "Time against shards",
    MEMORY_PICTURE: "Memory against rows",
}
"""File beside the page → what it shows."""

_KINDS: tuple[Kind, ...] = ("exact", "exact-bf16")

_BATCH = 64


def pictures(scaling: Scaling) -> dict[str, str]:
    """File name → SVG."""
    by_rows = [
        Line(
            label=f"{method}, {queries} {'query' if queries == 1 else 'queries'}",
            points=_points(scaling, method, queries),
        )
        for method in _KINDS
        for queries in sorted({r.queries for r in scaling.results})
    ]
    by_shards = [
        Line(label=method, points=tuple((s.shards, s.median_ms) for s in scaling.shards if s.method == method))
        for method in _KINDS
    ]
    memory = [
        Line(label=f"{method}, {what}", points=_memory(scaling, method, what))
        for method in _KINDS
        for what in ("own", "mapped")
    ]
    dim, threads = scaling.results[0].dim, scaling.machine.threads
    rows, batch = scaling.shards[0].rows, scaling.shards[0].queries
    return {
        ROWS_PICTURE: line_chart(by_rows, f"Time of a batch, {dim} dimensions, {threads} cores", "rows", "ms"),
        SHARDS_PICTURE: line_chart(by_shards, f"{rows:,} rows in shards, {batch} queries", "shards", "ms"),
        MEMORY_PICTURE: line_chart(memory, "Memory of the process that serves them", "rows", "MiB"),
    }


def comparison(files: Sequence[Benchmark]) -> str:
    """A table of every method of every file."""
    lines = [
        "| rows × dimensions | queries | cutoffs | method | ms | × FAISS selector | of roofline | recall | late |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in (r for file in files for r in file.results):
        speedup = "" if r.speedup_vs_faiss_selector is None else f"{r.speedup_vs_faiss_selector:.1f}"
        lines.append(
            f"| {r.rows:,} × {r.dim:,} | {r.queries} | {r.cutoffs} | {r.method} | {r.median_ms:,.1f} | {speedup} | "
            f"{r.roofline:.2f} | {r.recall:.3f} | {r.late} |"
        )
    lines += ["", "| rows × dimensions | half of the rows over all of them | GB/s | GFLOP/s | cores | steadiness |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    for file in files:
        first, m = file.results[0], file.machine
        halves = ", ".join(f"{method} {ratio:.2f}" for method, ratio in file.half_over_all.items())
        lines.append(
            f"| {first.rows:,} × {first.dim:,}, {first.queries} queries | {halves} | {m.gigabytes_per_s:.0f} | {m.gigaflops:.0f} | "
            f"{m.threads} | {m.steadiness:.2f} |"
        )
    pooled = [(file.results[0], p) for file in files for p in file.pool]
    if pooled:
        lines += [
            "",
            "| the Ray pool | kind | callers | queries/s | × one at a time | median ms | 95% within ms | queries a batch |",
        ]
        lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    lines += [
        f"| {r.rows:,} × {r.dim:,} | {p.kind} | {p.callers} | {p.queries_per_s:,.0f} | {p.speedup:.1f} | {p.p50_ms:.1f} | {p.p95_ms:.1f} | "
        f"{p.mean_batch:.1f} |"
        for r, p in pooled
    ]
    return "\n".join(lines)


def measured_speed(files: Sequence[Benchmark], kind: Kind, dim: int) -> Speed:
    """What one core achieved: with one query from the file with one, with many from the file with most; of the nearest dimension.

    Raises DataError if a file is lacking.
    """

    def best(many: bool) -> tuple[MethodResult, Benchmark]:
        found = [(r, f) for f in files for r in f.results if r.method == kind and (r.queries > 1) == many]
        if not found:
            raise DataError(
                f"no file has figures of {kind} with {'many queries' if many else 'one query'}; run bench_retrieval with --queries"
            )
        return min(found, key=lambda pair: (abs(pair[0].dim - dim), -pair[0].queries, -pair[0].rows))

    (one, alone), (many, together) = best(False), best(True)
    return Speed(
        read_per_s=one.roofline * alone.machine.gigabytes_per_s * 1e9 / alone.machine.threads,
        operations_per_s=many.roofline * together.machine.gigaflops * 1e9 / together.machine.threads,
    )


def needs_table(corpus: Corpus, node: Node, gpu: Gpu, speeds: dict[Kind, Speed]) -> str:
    """What the corpus needs, kind by kind, on nodes and on GPUs."""
    lines = [
        "| kind | on disk, GB | in memory, GB | nodes | one query, s | queries/s | GPUs | GPU queries/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    kinds: tuple[Kind, ...] = ("exact", "exact-bf16", "approximate")
    for kind in kinds:
        speed = speeds.get(kind)
        alone = rate = ""
        if speed is not None:
            alone = f"{node.batch_seconds(corpus, kind, speed, 1):.2f}"
            rate = f"{_BATCH / node.batch_seconds(corpus, kind, speed, _BATCH):,.0f}"
        on_gpu = ("", "")
        if kind == "exact-bf16":
            on_gpu = (f"{gpu.count(corpus, kind)}", f"{_BATCH / gpu.batch_seconds(corpus, kind, _BATCH):,.0f}")
        lines.append(
            f"| {kind} | {corpus.disk_bytes(kind) / 1e9:,.0f} | {corpus.scanned_bytes(kind) / 1e9:,.0f} | "
            f"{node.count(corpus, kind)} | {alone} | {rate} | {on_gpu[0]} | {on_gpu[1]} |"
        )
    return "\n".join(lines)


def filled(page: str, parts: dict[str, str]) -> str:
    """The page with each part between its markers. Raises DataError for markers that the page lacks."""
    for name, content in parts.items():
        before, opened, rest = page.partition(f"<!-- {name} -->\n")
        _, closed, after = rest.partition(f"<!-- /{name} -->")
        if not opened or not closed:
            raise DataError(
                f"the page has no part named {name}; put <!-- {name} --> and <!-- /{name} --> on lines of their own"
            )
        page = f"{before}{opened}{content}\n{closed}{after}"
    return page


def main(
    search: Annotated[list[Path], typer.Option(help="Files of bench_retrieval; may be repeated.")],
    scaling: Annotated[Path | None, typer.Option(help="The file of bench_scaling.")] = None,
    write: Annotated[Path | None, typer.Option(help="The page; pictures go beside it.")] = None,
    rows: Annotated[int, typer.Option(help="Articles of the corpus.")] = 18_826_940,
    dim: int = 4_096,
    visible: Annotated[float, typer.Option(help="Mean share of the rows that a cutoff admits.")] = 0.5,
    cores: Annotated[int, typer.Option(help="Of a node.")] = 64,
    memory_gib: Annotated[float, typer.Option(help="Of a node.")] = 512.0,
    gpu_gib: Annotated[float, typer.Option(help="Memory of a GPU.")] = 139.0,
    gpu_terabytes_per_s: float = 4.8,
    gpu_teraflops: Annotated[float, typer.Option(help="Dense, half precision.")] = 989.0,
    gpu_share: Annotated[float, typer.Option(help="Of both; gpu_check measures that of the bandwidth.")] = 0.5,
) -> None:
    """Make the tables and pictures of docs/scaling.md. Example: python -m scripts.plot_retrieval --search a.json --rows 1000000."""
    files = [Benchmark.model_validate_json(file.read_text()) for file in search]
    corpus = Corpus(rows=rows, dim=dim, visible=visible)
    gpu = Gpu(
        memory_gib=gpu_gib,
        read_per_s=gpu_terabytes_per_s * 1e12,
        operations_per_s=gpu_teraflops * 1e12,
        share=gpu_share,
    )
    speeds: dict[Kind, Speed] = {kind: measured_speed(files, kind, dim) for kind in _KINDS}
    parts = {
        "measured": comparison(files),
        "needs": needs_table(corpus, Node(cores=cores, memory_gib=memory_gib), gpu, speeds),
    }
    for content in parts.values():
        console.print(content, markup=False, highlight=False, soft_wrap=True)
    if write is None:
        return
    if scaling is not None:
        drawn = pictures(Scaling.model_validate_json(scaling.read_text()))
        for name, picture in drawn.items():
            (write.parent / name).write_text(picture)
        parts["pictures"] = "\n\n".join(f"![{title}]({name})" for name, title in PICTURES.items())
    write.write_text(filled(write.read_text(), parts))


def _points(scaling: Scaling, method: str, queries: int) -> tuple[tuple[float, float], ...]:
    chosen = [r for r in scaling.results if r.method == method and r.queries == queries]
    return tuple((r.rows, r.median_ms) for r in sorted(chosen, key=lambda r: r.rows))


def _memory(scaling: Scaling, method: str, what: str) -> tuple[tuple[float, float], ...]:
    """With the larger batch, whose cutoffs reach furthest."""
    most = max(r.queries for r in scaling.results)
    chosen = sorted((r for r in scaling.results if r.method == method and r.queries == most), key=lambda r: r.rows)
    return tuple((r.rows, r.own_mib if what == "own" else r.mapped_mib) for r in chosen)


if __name__ == "__main__":
    typer.run(main)
