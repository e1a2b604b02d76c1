"""What the documentation shows can be done: its settings load, its links lead somewhere, its files are well-formed."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from cluster.config import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
MANIFESTS = sorted((ROOT / "cluster" / "deploy").glob("*.yaml"))
FILE_ENDINGS = ("yaml", "jsonl", "sqlite", "json")


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


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
