from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from tiered_kv.config import CpuSettings, load
from tiered_kv.errors import ConfigError, PluginError
from tiered_kv.plugins import GROUP, Plugins, build_registry
from tiered_kv.specs import CpuSpec, GpuSpec

DESCRIPTOR = """
    from dataclasses import dataclass
    from typing import ClassVar, Literal
    from tiered_kv.config import Directory, TierSettings
    from tiered_kv.contracts import API_VERSION, Backend
    from tiered_kv.specs import CpuSpec, GpuSpec, KeySpec
    from tiered_kv.values import Medium

    @dataclass(frozen=True, slots=True)
    class TapeSpec(KeySpec):
        medium: ClassVar[Medium] = Medium("tape")

    class TapeSettings(TierSettings, frozen=True):
        type: Literal["tape"] = "tape"
        path: Directory

    class LooseSettings(TierSettings, frozen=True, extra="ignore"):
        type: Literal["tape"] = "tape"

    class OtherSettings(TierSettings, frozen=True):
        type: str = "tape"

    @dataclass(frozen=True, slots=True)
    class NoMediumSpec(TapeSpec):
        pass

    PARTS = dict(
        name="tape",
        medium=Medium("tape"),
        api_version=API_VERSION,
        description="Tapes.",
        settings=lambda: TapeSettings,
        spec=TapeSpec,
        open_store=lambda context: None,
    )
    """

Author = Callable[..., EntryPoint]


@pytest.fixture
def author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Author:
    """Writes a third party's module and gives its entry point."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(code: str, name: str = "tape", module: str = "") -> EntryPoint:
        module = module or f"thirdparty_{tmp_path.name}_{len(list(tmp_path.iterdir()))}".replace(
            "-", "_"
        )
        text = textwrap.dedent(DESCRIPTOR) + textwrap.dedent(code)
        (tmp_path / f"{module}.py").write_text(text)
        return EntryPoint(name, f"{module}:backend", GROUP)

    return write


def install(
    site: Path, distribution: str, module: str, version: str = "1.0", name: str = "tape"
) -> None:
    """What pip would leave behind for a package that announces one backend."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {module}:backend\n")


def plugins_of(*entries: EntryPoint) -> Plugins:
    return Plugins(lambda: entries)


def test_a_third_partys_backend(author: Author, tmp_path: Path) -> None:
    plugins = plugins_of(author("backend = Backend(**PARTS)"))
    assert plugins.names() == ("tape",)
    backend = plugins.get("tape")
    assert plugins.get("tape") is backend
    assert plugins.usable("tape") is backend
    assert plugins.deployed(["cpu", "tape"]) == {"tape": backend}
    (line,) = plugins.report()
    assert (line.available, line.tier, line.medium, line.reason) == (True, True, "tape", None)
    file = tmp_path / "d.yaml"
    file.write_text("tiers: [{name: t, type: tape, path: /tape}]")
    deployment = load(file, plugins, {})
    assert deployment.tiers[0].directories == {"path": Path("/tape")}


def test_entry_points_are_read_and_loaded_late() -> None:
    read: list[str] = []
    missing = EntryPoint("gone", "no_such_module:backend", GROUP)

    def discover() -> list[EntryPoint]:
        read.append("read")
        return [missing]

    plugins = Plugins(discover)
    assert read == []
    assert plugins.all_names() == plugins.all_names() == ("gone",)
    assert read == ["read"]
    for _ in range(2):
        with pytest.raises(PluginError, match="No module named 'no_such_module'"):
            plugins.get("gone")
    plugins.refresh()
    assert plugins.all_names() == ("gone",)
    assert read == ["read", "read"]


def test_importing_a_descriptor_waits_until_it_is_asked_for(author: Author) -> None:
    entry = author("backend = Backend(**PARTS)")
    plugins = plugins_of(entry)
    assert plugins.all_names() == ("tape",)
    assert entry.module not in sys.modules
    plugins.get("tape")
    assert entry.module in sys.modules


def test_a_backend_that_cannot_be_loaded_hurts_only_those_who_name_it(
    author: Author, tmp_path: Path
) -> None:
    plugins = plugins_of(
        author("backend = Backend(**PARTS)"),
        author("raise OSError('libtape.so: cannot open')", name="broken"),
    )
    broken, tape = plugins.report()
    assert tape.available
    assert not broken.available
    assert "OSError: libtape.so: cannot open" in str(broken.reason)
    assert broken.hint
    assert set(plugins.deployed(["tape"])) == {"tape"}
    file = tmp_path / "d.yaml"
    file.write_text("tiers:\n - {name: t, type: tape, path: /t}\n - {name: b, type: broken}\n")
    with pytest.raises(ConfigError, match=r"d.yaml:3: tiers.1.type: backend 'broken' of .*libtape"):
        load(file, plugins, {})
    with pytest.raises(PluginError, match="libtape"):
        plugins.usable("broken")


def test_a_missing_requirement_is_named_with_the_command_to_install_it(author: Author) -> None:
    plugins = plugins_of(
        author(
            """backend = Backend(**PARTS, requires=(
                ("json", "json"), ("no_such_driver", "tape-driver>=2"), ("no_pkg.sub", "pkg")))"""
        )
    )
    assert plugins.get("tape").name == "tape"
    (line,) = plugins.report()
    assert not line.available
    assert line.reason == "needs no_such_driver, no_pkg.sub, which is not installed"
    assert line.hint == "pip install 'tape-driver>=2' 'pkg'"
    with pytest.raises(PluginError, match=r"needs no_such_driver.*pip install 'tape-driver>=2'"):
        plugins.usable("tape")
    with pytest.raises(PluginError, match="no_such_driver"):
        plugins.deployed(["tape"])
    assert "no_such_driver" not in sys.modules


def test_an_unknown_backend(author: Author) -> None:
    plugins = plugins_of(author("backend = Backend(**PARTS)"))
    with pytest.raises(KeyError):
        plugins.get("tpae")
    with pytest.raises(PluginError, match="no backend 'tpae'; did you mean 'tape'"):
        plugins.usable("tpae")
    with pytest.raises(PluginError, match="none is installed"):
        plugins_of().usable("tape")


def test_two_packages_that_claim_one_name_are_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "red-tape", "red_tape")
    install(tmp_path, "blue-tape", "blue_tape", "2.0")
    found = [entry for entry in entry_points(group=GROUP) if entry.name == "tape"]
    assert len(found) == 2
    plugins = plugins_of(*found)
    with pytest.raises(PluginError) as caught:
        plugins.get("tape")
    for part in ("red-tape (red_tape:backend)", "blue-tape (blue_tape:backend)", "uninstall one"):
        assert part in str(caught.value)
    (line,) = plugins.report()
    assert not line.available
    assert "red-tape" in line.distribution
    assert "2.0" in line.version


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("backend = object()", "is a object; expected a tiered_kv.contracts.Backend"),
        ("other = 1", "has no attribute 'backend'"),
        ("backend = Backend()", "TypeError"),
        (
            "backend = Backend(**PARTS | {'api_version': 99})",
            "API version 99; this tiered-kv has API version 1; update tiered-kv",
        ),
        ("backend = Backend(**PARTS | {'api_version': 0})", "update the package"),
        (
            "backend = Backend(**PARTS | {'api_version': '1'})",
            "has the API version '1'; expected a number, now 1",
        ),
        ("backend = Backend(**PARTS | {'name': 'tpae'})", "calls itself 'tpae'"),
        ("backend = Backend(**PARTS | {'spec': None})", "together, or none of them"),
        (
            "backend = Backend('tape', Medium('tape'), API_VERSION, 'Tapes.')",
            "brings neither a store",
        ),
        (
            "backend = Backend(**PARTS | {'spec': dict})",
            "expected a subclass of tiered_kv.specs.Key",
        ),
        ("backend = Backend(**PARTS | {'spec': KeySpec})", "of its own"),
        ("backend = Backend(**PARTS | {'spec': NoMediumSpec})", "does not set `medium` itself"),
        (
            "backend = Backend(**PARTS | {'medium': Medium('disk')})",
            "has medium 'disk', but its spec has 'tape'",
        ),
        (
            "backend = Backend(**PARTS | {'open_store': lambda: None})",
            "has open_store(); expected open_store(context: StoreContext) -> BlockStore",
        ),
        (
            "backend = Backend(**PARTS | {'open_store': lambda a, b: None})",
            "has open_store(a, b); expected",
        ),
        (
            "backend = Backend(**PARTS | {'register': lambda: None})",
            "has register(); expected register(registry: TransferRegistry) -> None",
        ),
        ("backend = Backend(**PARTS | {'settings': lambda x: None})", "has settings(x); expected"),
        ("backend = Backend(**PARTS | {'settings': TapeSettings(name='a', path='/a')})", "called"),
    ],
)
def test_a_wrong_shape_is_refused_at_the_door(author: Author, code: str, said: str) -> None:
    plugins = plugins_of(author(code))
    with pytest.raises(PluginError) as caught:
        plugins.get("tape")
    assert said in str(caught.value)
    assert "backend 'tape' of unknown (thirdparty_" in str(caught.value)
    (line,) = plugins.report()
    assert not line.available
    assert said in str(line.reason)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("lambda: dict", "expected a subclass of tiered_kv.config.TierSettings"),
        ("lambda: 1 / 0", "cannot give its settings: ZeroDivisionError"),
        ("lambda: OtherSettings", 'without `type: Literal["tape"] = "tape"`'),
        ("lambda: LooseSettings", "allow unknown keys"),
    ],
)
def test_wrong_settings_are_refused(author: Author, settings: str, said: str) -> None:
    plugins = plugins_of(author(f"backend = Backend(**PARTS | {{'settings': {settings}}})"))
    with pytest.raises(PluginError) as caught:
        plugins.settings("tape")
    assert said in str(caught.value)
    (line,) = plugins.report()
    assert not line.available


def test_the_cores_names_are_taken(author: Author) -> None:
    cpu = author("backend = Backend(**PARTS | {'name': 'cpu'})", name="cpu")
    with pytest.raises(PluginError, match="no tier type may have"):
        plugins_of(cpu).get("cpu")


def test_handlers_without_a_tier(author: Author, tmp_path: Path) -> None:
    plugins = plugins_of(
        author(
            """
            def register(registry):
                registry.register(GpuSpec, CpuSpec, lambda context: None, provider="mover")

            backend = Backend("mover", Medium("gpu"), API_VERSION, "Moves.", register=register)
            """,
            name="mover",
        )
    )
    assert plugins.all_names() == ("mover",)
    assert plugins.names() == ()
    backends = plugins.deployed([])
    assert set(backends) == {"mover"}
    registry = build_registry(backends)
    assert (GpuSpec, CpuSpec) in registry
    assert registry.pair(GpuSpec, CpuSpec).provider == "mover"
    file = tmp_path / "d.yaml"
    file.write_text("tiers: [{name: t, type: mover}]")
    with pytest.raises(ConfigError, match="backend 'mover' cannot be a tier"):
        load(file, plugins, {})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('no tape')", "failed to register its handlers: RuntimeError: no tape"),
        (
            """for _ in range(2):
                    registry.register(GpuSpec, CpuSpec, lambda c: None, provider="mover")""",
            "registered by both",
        ),
    ],
)
def test_registering_that_fails(author: Author, body: str, said: str) -> None:
    entry = author(
        f"""
            def register(registry):
                {body}

            backend = Backend("mover", Medium("gpu"), API_VERSION, "Moves.", register=register)
            """,
        name="mover",
    )
    with pytest.raises(PluginError) as caught:
        build_registry({"mover": plugins_of(entry).get("mover")})
    assert said in str(caught.value)


def test_our_own_backends_come_through_the_same_door() -> None:
    plugins = Plugins()
    assert {"gpu", "nvme", "lmdb"} <= set(plugins.all_names())
    by_name = {line.name: line for line in plugins.report()}
    for name in ("gpu", "nvme", "lmdb"):
        assert by_name[name].available, by_name[name].reason
        assert by_name[name].distribution == "tiered-kv"
    assert {"nvme", "lmdb"} <= set(plugins.names())
    assert "gpu" not in plugins.names()
    assert not issubclass(plugins.settings("nvme"), CpuSettings)


def test_a_descriptor_imports_no_driver(tmp_path: Path) -> None:
    """In a process of its own: what is listed is not yet imported."""
    import subprocess

    code = (
        "import sys; from tiered_kv.plugins import Plugins; p = Plugins(); p.report(); p.names();"
        "print(sorted({'torch', 'lmdb', 'aiofiles', 'vllm', 'kvikio'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "[]"


MOVER = """
    def register(registry):
        registry.register(GpuSpec, CpuSpec, lambda context: None, provider="{name}")

    backend = Backend("{name}", Medium("gpu"), API_VERSION, "Moves.", register=register)
    """


def test_two_backends_that_claim_one_pair_are_both_named(author: Author) -> None:
    entries = [author(MOVER.format(name=name), name=name) for name in ("mover", "shover")]
    plugins = plugins_of(*entries)
    with pytest.raises(PluginError, match="registered by both 'mover' and 'shover'"):
        build_registry(plugins.deployed([]))
    mover, shover = plugins.report()
    assert mover.available
    assert not shover.available
    assert "registered by both 'mover' and 'shover'" in str(shover.reason)
    assert "uninstall one" in str(shover.hint)


def test_two_backends_that_claim_one_medium_are_both_named(author: Author) -> None:
    entries = [
        author("backend = Backend(**PARTS)"),
        author(
            """
            class CartridgeSettings(TierSettings, frozen=True):
                type: Literal["cartridge"] = "cartridge"

            changes = {"name": "cartridge", "settings": lambda: CartridgeSettings}
            backend = Backend(**PARTS | changes)
            """,
            name="cartridge",
        ),
    ]
    cartridge, tape = plugins_of(*entries).report()
    assert cartridge.available
    assert not tape.available
    assert "'tape' brings the medium 'tape', which 'cartridge' brings too" in str(tape.reason)


def test_a_backend_whose_registering_fails_is_reported(author: Author) -> None:
    entry = author(
        """
        def register(registry):
            raise RuntimeError("no tape")

        backend = Backend("mover", Medium("gpu"), API_VERSION, "Moves.", register=register)
        """,
        name="mover",
    )
    (line,) = plugins_of(entry).report()
    assert not line.available
    assert "RuntimeError: no tape" in str(line.reason)
