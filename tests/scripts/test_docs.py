"""What the documentation shows can be done and what it names exists: settings, links, files, reasons, metrics, scripts."""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import typer
import yaml

from cluster.config import Section, Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PACKAGES = ("cluster", "retrieval", "rollout", "eval", "training", "scripts")
MANIFESTS = sorted((ROOT / "cluster" / "deploy").glob("*.yaml"))
FILE_ENDINGS = ("yaml", "jsonl", "sqlite", "json")


def code_blocks(page: Path, language: str) -> list[str]:
    text = page.read_text().replace("\\\n", " ")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def running_text(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", running_text(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def sections(section: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Every section of the tree below `section`, by its dotted path."""
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield path + name, kind
                yield from sections(kind, f"{path}{name}.")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_override_that_a_page_shows_is_a_setting(page: Path) -> None:
    lines = [line for block in code_blocks(page, "") for line in block.splitlines() if "--set" in line]
    words = [shlex.split(line, comments=True) for line in lines]
    commands = [[ws[i + 1] for i, w in enumerate(ws) if w == "--set"] for ws in words]
    # `engine.options={a: b}` in running text, without its shell quotes.
    commands += [[shown] for shown in re.findall(r"`--set ([a-z_.]+=[^`]+)`", page.read_text())]
    for overrides in commands:
        load_settings([], overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_dotted_name_that_a_page_shows_is_a_setting(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", text):
        section: object = Settings()
        first, *_, last = name.split(".")
        if first not in Settings.model_fields or last in FILE_ENDINGS:
            continue
        for part in name.split("."):
            assert hasattr(section, part), f"{page.name} names {name}"
            section = getattr(section, part)


def test_the_field_mapping_in_the_documentation_loads(tmp_path: Path) -> None:
    (block,) = code_blocks(ROOT / "docs" / "data.md", "yaml")
    file = tmp_path / "mapping.yaml"
    file.write_text(block)
    settings = load_settings([file])
    assert settings.events.outcomes == {"true": "YES", "false": "NO"}
    assert settings.articles.fields["published"] == "published_at"


def test_the_settings_page_names_every_setting() -> None:
    rows = [line.split(" | ") for line in (ROOT / "docs" / "settings.md").read_text().splitlines() if line[:3] == "| `"]
    named = {
        name: set(re.findall(r"`(\w+)`", row[2])) for row in rows if len(row) == 3 for name in row[0][2:].split("`")
    }
    for path, section in sections(Settings):
        lacking = section.model_fields.keys() - named.get(path, set())
        unknown = named.get(path, set()) - section.model_fields.keys()
        assert not lacking, f"the row of {path} in docs/settings.md lacks {sorted(lacking)}"
        assert not unknown, f"the row of {path} in docs/settings.md names {sorted(unknown)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\((docs/\w+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {f"docs/{page.name}" for page in PAGES if page.parent != ROOT}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_file_of_the_repository_that_a_page_names_exists(page: Path) -> None:
    folders = "|".join((*PACKAGES, "tests", "configs", "docs"))
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", running_text(page)):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.fixture(scope="module")
def source() -> str:
    """The text of everything that runs."""
    files = [f for p in PACKAGES for f in (ROOT / p).rglob("*") if f.suffix in (".py", ".sh", ".yaml", ".jinja")]
    return "\n".join(f.read_text() for f in [*files, ROOT / "Makefile", ROOT / "pyproject.toml"])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_reason_and_choice_that_a_page_names_is_in_the_code(page: Path, source: str) -> None:
    for name in re.findall(r"`([a-z]+(?:-[a-z0-9]+)+)`", running_text(page)):
        # A bug's reason is the name of its exception.
        error = "".join(part.capitalize() for part in name.split("-"))
        assert f'"{name}"' in source or f"class {error}(" in source, f"{page.name} names {name}"


def test_the_metrics_are_those_of_the_page() -> None:
    text = running_text(ROOT / "docs" / "monitoring.md")
    sources = [
        ROOT / "rollout" / "metrics.py",
        *(ROOT / "retrieval" / f for f in ("shard_metrics.py", "encoder_server.py")),
    ]
    published = {name for file in sources for name in re.findall(r'"(pastcast_[a-z_]+[a-z])"', file.read_text())}
    named = set(re.findall(r"ray_(pastcast_[a-z_]+)", text))
    (first, others) = re.findall(r"`ray_(pastcast_engine)_running`, ((?:`_[a-z_]+`,? ?)+)", text)[0]
    named |= {first + suffix for suffix in re.findall(r"`(_[a-z_]+)`", others)}
    assert named == published


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_script_and_target_that_a_page_shows_takes_its_options(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|`)(?:[A-Z_]+=\S+ )?make ([a-z]+)(?:$|`)", text, re.MULTILINE)) <= set(targets)
    shown = re.findall(r"(?:^|`)python (?:-m scripts\.(\w+)|scripts/(\w+)\.py)([^`\n]*)", text, re.MULTILINE)
    for module, file, options in shown:
        script = typer.Typer()
        script.command()(importlib.import_module(f"scripts.{module or file}").main)
        typer.main.get_command(script).make_context("script", shlex.split(options, comments=True))


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_config_of_the_repository_loads(config: Path) -> None:
    load_settings([config])


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda p: p.name)
def test_every_cluster_file_is_well_formed(manifest: Path) -> None:
    content = yaml.safe_load(manifest.read_text())
    assert isinstance(content, dict)
    if "kind" in content:
        assert {"apiVersion", "kind", "metadata", "spec"} <= set(content)


def test_the_cluster_files_name_the_version_of_ray_that_is_pinned() -> None:
    (pinned,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    job = yaml.safe_load((ROOT / "cluster" / "deploy" / "rayjob.yaml").read_text())
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == pinned
    assert f"rayproject/ray:{pinned}-" in (ROOT / "cluster" / "deploy" / "Dockerfile").read_text()
