"""What `deploy/` and docs/deployment.md tell people to run: vLLM and `itemset` take these arguments."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import engines
import pages
import yaml

from itemset import cli
from itemset.serving.config import StaticConfig

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
OBJECTS: list[Any] = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))


def pod(kind: str) -> dict[str, Any]:
    (found,) = (one for one in OBJECTS if one["kind"] == kind)
    spec = found["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else found["spec"]
    return spec["template"]["spec"]


def entry_point() -> list[str]:
    (line,) = (line for line in DOCKERFILE.splitlines() if line.startswith("ENTRYPOINT "))
    return json.loads(line.removeprefix("ENTRYPOINT "))


def options_of(arguments: list[str]) -> StaticConfig:
    """The plugin's options of a server started by these arguments, as vLLM's own parser takes them."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_static import engine_config, plugin

    plugin.register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(arguments)
    engine_config.apply_flags(args)
    assert args.structured_outputs_config.backend == "static"
    return StaticConfig.of(args.additional_config)


def test_the_servers_of_the_pages() -> None:
    commands = pages.commands_of("python", "-m", "vllm.entrypoints.openai.api_server")
    assert ["--enforce-eager", "--model"] in commands
    commands.remove(["--enforce-eager", "--model"])
    assert len(commands) >= 6
    for words in commands:
        options = options_of(words)
        assert options.item_sets or options.item_set_dir
    assert pages.commands_of("python", "-m", "itemset.serving.warm_up") == [[]]
    assert importlib.util.find_spec("itemset.serving.warm_up")


def test_the_offline_engine_of_the_first_page(tmp_path: Path, tiny_model: Path) -> None:
    (block,) = [block for kind, block in pages.site()["index.md"] if kind == "python" and "LLM(" in block]
    (tmp_path / "movies.csv").write_text("movie_id,title\n1,Toy Story\n2,GoldenEye\n")
    on_cpu = block.replace('"path/to/model"', f'"{tiny_model}", enforce_eager=True')  # as docs/install.md says
    (tmp_path / "page.py").write_text(on_cpu)
    environment = engines.environment("v1") | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "page.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.stdout.splitlines()[-1] in ("Toy Story", "GoldenEye"), done.stderr[-2000:]


def test_the_parameters_of_rollouts(tmp_path: Path) -> None:
    from vllm import SamplingParams

    assert pages.follow("training.md", tmp_path, "model", SamplingParams=SamplingParams) == [""]


def test_the_deployment_of_ray_serve() -> None:
    """Ray Serve is not installed with the tests: what its engine is given is what our plugin reads."""
    ((_, block),) = [
        (kind, block) for kind, block in pages.site()["deployment.md"] if kind == "python" and "ray.serve" in block
    ]
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.keyword)]
    (given,) = (ast.literal_eval(node.value) for node in calls if node.arg == "engine_kwargs")
    assert StaticConfig.of(given["additional_config"]).item_sets == {"films": "/sets/films.itemset"}
    assert given["structured_outputs_config"] == {"backend": "static"}
    (middleware,) = given["middleware"]
    assert callable(resolve_name(middleware.replace(".http.", ".http:")))


def test_the_container_serves_the_mounted_sets() -> None:
    (container,) = pod("Deployment")["containers"]
    model, *arguments = container["args"]
    program, serve, *flags = entry_point()
    assert (program, serve, model) == ("vllm", "serve", "Qwen/Qwen3-8B")
    options = options_of([*flags, *arguments])
    mounted = {one["mountPath"]: one for one in container["volumeMounts"]}
    assert mounted[options.item_set_dir]["readOnly"]
    assert "readOnly" not in mounted[options.item_set_cache]
    assert mounted.keys() >= {"/sets", "/copies"}


def test_the_job_publishes_where_servers_look() -> None:
    (container,) = pod("CronJob")["containers"]
    program, *words = container["command"]
    assert program == "itemset"
    args = cli._parser(words).parse_args(words)
    assert args.run is cli.publish.publish
    (mount,) = container["volumeMounts"]
    assert Path(args.folder).parent == Path(mount["mountPath"])
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod("CronJob")["volumes"]]
    assert claims == [one["metadata"]["name"] for one in OBJECTS if one["kind"] == "PersistentVolumeClaim"]


def test_every_mounted_volume_is_there_and_the_service_finds_its_pods() -> None:
    for kind in ("Deployment", "CronJob"):
        for container in pod(kind)["containers"]:
            volumes = {volume["name"] for volume in pod(kind)["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    (service,) = (one["spec"] for one in OBJECTS if one["kind"] == "Service")
    (deployment,) = (one["spec"] for one in OBJECTS if one["kind"] == "Deployment")
    assert service["selector"].items() <= deployment["template"]["metadata"]["labels"].items()
    ports = [port["containerPort"] for one in pod("Deployment")["containers"] for port in one["ports"]]
    assert [port["targetPort"] for port in service["ports"]] == ports


def test_dashboards_and_alerts_ask_for_metrics_that_there_are() -> None:
    from prometheus_client import REGISTRY

    from vllm_static import metrics  # noqa: F401  which registers them

    labels = {
        name: set(getattr(collector, "_labelnames", ()))
        for collector, names in REGISTRY._collector_to_names.items()
        for name in names
        if name.startswith("item_set:")
    }
    rules = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())["groups"][0]["rules"]
    board = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    asked = [rule["expr"] for rule in rules]
    asked += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = set()
    for query in asked:
        names = {f"item_set:{name}" for name in re.findall(r"item_set\[:_\](\w+)", query)}
        assert names
        assert names <= labels.keys(), query
        known = set.union({"instance"}, *(labels[name] for name in names))
        assert {one.strip() for by in re.findall(r"by \(([^)]*)\)", query) for one in by.split(",")} <= known, query
        used |= names
    page = (ROOT / "docs" / "serving.md").read_text()
    shown = set(re.findall(r"`(item_set:\w+)", page))
    assert shown <= labels.keys()
    assert used == shown


def test_the_page_names_commands_that_exist() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    commands = [shlex.split(line.strip()) for line in page.splitlines() if line.strip().startswith("itemset ")]
    assert commands
    for command in commands:
        cli._parser(command[1:]).parse_args(command[1:])
    assert (ROOT / "deploy" / "Dockerfile").name in page
