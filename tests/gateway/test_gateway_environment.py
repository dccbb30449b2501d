"""G17: settings from the environment, and files to deploy that name only what there is."""

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stillfresh.cli import main
from stillfresh.cli.serving import serve
from stillfresh.gateway import gateway
from stillfresh.gateway.config import MODELS, Mistakes, Settings, load
from stillfresh.gateway.environment import variables_in
from stillfresh.gateway.reloading import after_reload, unchangeable
from stillfresh.pages import Route
from tests.kit.gateway import client_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SITE = {"STILLFRESH_PAGES__UPSTREAM": "http://x"}


def told(environ: dict[str, str], over: dict[str, Any] | None = None) -> Settings:
    return load(None, over, environ)


def mistakes_in(environ: dict[str, str]) -> tuple[str, ...]:
    with pytest.raises(Mistakes) as caught:
        told(environ)
    return caught.value.mistakes


class TestG17Environment:
    def test_every_table_can_be_set_by_environment_variables(self) -> None:
        """Texts, numbers, durations, flags, lists and tables, without a file."""
        found = told(
            {
                **SITE,
                "STILLFRESH_STORE__URL": "sqlite:///a.db",
                "STILLFRESH_STORE__MEMORY_FOR": "2s",
                "STILLFRESH_PAGES__ROUTES": '{ "/blog/*" = "10m" }',
                "STILLFRESH_PAGES__QUERY": "page, sort",
                "STILLFRESH_SERVER__ORIGINS": '["https://a.example"]',
                "STILLFRESH_SERVER__PORT": "9000",
                "STILLFRESH_SERVER__TOKEN": "123456",
                "STILLFRESH_SERVER__DRAIN": "5",
                "STILLFRESH_SERVER__AUTHENTICATE_URL": "http://x/who",
                "STILLFRESH_KINDS__POST__URL": "http://y/{viewer_id}/{id}",
                "STILLFRESH_KINDS__POST__FRESH_FOR": "5m",
                "STILLFRESH_KINDS__POST__PER_VIEWER": "true",
                "STILLFRESH_KINDS__POST__HEADERS": '{ X-Key = "k" }',
            }
        )
        assert (found.store.url, found.store.memory_for) == ("sqlite:///a.db", 2)
        assert found.pages is not None
        assert found.pages.routes == {"/blog/*": Route(600)}
        assert found.pages.query == ("page", "sort")
        server = found.server
        assert (server.port, server.token, server.drain) == (9000, "123456", 5)
        assert server.origins == ("https://a.example",)
        (kind,) = found.kinds
        assert (kind.name, kind.fresh_for, kind.per_viewer) == ("post", 300, True)
        assert kind.headers == {"X-Key": "k"}

    def test_options_override_variables_and_variables_override_the_file(
        self, tmp_path: Path
    ) -> None:
        """Key by key, also within a kind."""
        file = tmp_path / "s.toml"
        file.write_text(
            '[server]\nport = 1\nhost = "a"\nworkers = 1\n'
            '[kinds.post]\nurl = "http://x/{id}"\nfresh_for = 1\n'
        )
        environ = {
            "STILLFRESH_SERVER__PORT": "2",
            "STILLFRESH_SERVER__HOST": "b",
            "STILLFRESH_KINDS__POST__FRESH_FOR": "7s",
        }
        found = load(file, {"server": {"port": 3}}, environ)
        assert (found.server.port, found.server.host, found.kinds[0].fresh_for) == (3, "b", 7)
        assert found.kinds[0].url == "http://x/{id}"

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("STILLFRESH_STORE__ULR", "did you mean STILLFRESH_STORE__URL?"),
            ("STILLFRESH_STORE_URL", "did you mean STILLFRESH_STORE__URL?"),
            ("STILLFRESH_SERVER__HOTS", "did you mean STILLFRESH_SERVER__HOST"),
            ("STILLFRESH_KINDS__POST__FRESH", "did you mean STILLFRESH_KINDS__NAME__FRESH_FOR?"),
            ("STILLFRESH_KINDS__FRESH_FOR", "did you mean STILLFRESH_KINDS__NAME__FRESH_FOR?"),
            ("STILLFRESH_STORE__URL__X", "did you mean STILLFRESH_STORE__URL?"),
            ("STILLFRESH_X__Y", ""),
        ],
    )
    def test_an_unknown_variable_gets_a_hint_without_its_value(self, name: str, meant: str) -> None:
        """And no value of it is shown."""
        (line,) = mistakes_in({**SITE, name: "hush"})
        assert line.startswith(f"{name}: unknown setting; {meant}")
        assert "hush" not in line

    def test_variables_of_other_programs_are_ignored(self) -> None:
        """Of a Kubernetes service of this name, of our own other variables."""
        others = {"STILLFRESH_PORT": "tcp://1", "STILLFRESH_SERVICE_HOST": "x"}
        assert told({**SITE, **others, "STILLFRESH_TOKEN": "t"}).server.token == "t"  # noqa: S105

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("STILLFRESH_SERVER__TOKEN", "hush hush"),
            ("STILLFRESH_STORE__URL", "redis://me:hush@[x"),
            ("STILLFRESH_PAGES__UPSTREAM", "http://me:hush@x"),
        ],
    )
    def test_a_mistake_names_the_variable_and_no_secret(self, name: str, value: str) -> None:
        """Not the key of a file that there is not."""
        (line,) = mistakes_in({**SITE, name: value})
        assert line.startswith(f"{name}: ")
        assert "hush" not in line

    @given(
        st.dictionaries(
            st.text("ABCDEKINDSTORU_", max_size=12).map(lambda it: f"STILLFRESH_{it}"),
            st.text(max_size=20),
        )
    )
    def test_any_variable_is_read_or_reported_as_a_mistake(self, environ: dict[str, str]) -> None:
        """Every variable with `__` is read, or told as a mistake."""
        _, named, mistakes = variables_in(environ, MODELS)
        asked = {name for name in environ if "__" in name.removeprefix("STILLFRESH_")}
        told_of = {line.partition(":")[0] for line in mistakes}
        assert asked <= told_of | set(named.values())

    def test_a_reload_keeps_settings_that_need_a_restart(self) -> None:
        """The socket and the processes; each difference is told."""
        old = told({**SITE, "STILLFRESH_SERVER__PORT": "1"})
        new = told({"STILLFRESH_PAGES__UPSTREAM": "http://y", "STILLFRESH_SERVER__PORT": "2"})
        assert list(unchangeable(old, new)) == ["server.port: takes a restart; it stays 1"]
        after = after_reload(old, new)
        assert after.server.port == 1
        assert after.pages == new.pages


def settings_named(text: str) -> set[str]:
    return set(re.findall(r"STILLFRESH_[A-Z_]+", text)) - {"STILLFRESH_TOKEN"}


OPTIONS = {option for param in serve.params for option in param.opts}
HELP = main.context_settings["help_option_names"]
"""As `main` would tell `serve`, which keeps what it was told first."""
FILES = sorted(it for it in DEPLOY.iterdir() if it.is_file())


class TestG17DeployedFiles:
    """No Docker engine runs here: what a file names is compared with what there is."""

    @pytest.mark.parametrize("path", FILES, ids=lambda it: it.name)
    def test_every_variable_in_the_deployment_files_exists(self, path: Path) -> None:
        """Every variable is one that the gateway takes."""
        _, named, mistakes = variables_in(
            dict.fromkeys(settings_named(path.read_text()), "x"), MODELS
        )
        assert (mistakes, bool(named)) == ([], True)

    def test_the_docker_image_has_a_user_and_a_health_check_on_its_port(self) -> None:
        """Not root, with a health check on the port it listens on, from files that are there."""
        text = (DEPLOY / "Dockerfile").read_text()
        lines = re.sub(r"\\\n\s*", "", text).splitlines()
        named = {line.split()[0]: line for line in lines if line and not line.startswith("#")}
        assert int(named["USER"].split()[1]) > 0
        port = re.search(r"SERVER__PORT=(\d+)", text)
        assert port is not None
        assert named["EXPOSE"] == f"EXPOSE {port[1]}"
        assert f":{port[1]}/healthz" in named["HEALTHCHECK"]
        assert named["ENTRYPOINT"] == 'ENTRYPOINT ["stillfresh", "serve"]'
        for line in (it for it in lines if it.startswith("COPY ") and "--from" not in it):
            assert all((ROOT / it).exists() for it in line.split()[1:-1]), line
        extras = re.search(r"\.\[([\w,]+)\]", text)
        assert extras is not None
        assert {"web", "cli", "redis", "postgres"} <= set(extras[1].split(","))

    @pytest.mark.parametrize("name", ["compose.valkey.yaml", "compose.postgres.yaml"])
    def test_the_compose_files_name_existing_services_and_settings(self, name: str) -> None:
        """Services that wait for services that there are; settings that can be read."""
        found = yaml.safe_load((DEPLOY / name).read_text())
        services = found["services"]
        gateway = services["gateway"]
        assert (DEPLOY / gateway["build"]["context"] / gateway["build"]["dockerfile"]).exists()
        for service in services.values():
            assert set(service.get("depends_on", {})) <= set(services)
        environ = {key: str(it) for key, it in gateway["environment"].items()}
        environ.pop("STILLFRESH_SERVER__TOKEN_FILE", None)
        settings = told(environ)
        assert re.search(r"//(?:[^@]*@)?(\w+)", settings.store.url)[1] in services  # type: ignore[index]
        if "tables" in services:
            program, *command = services["tables"]["entrypoint"]
            assert program == "stillfresh"
            context = main.make_context("stillfresh", command[:1], resilient_parsing=True)
            assert main.get_command(context, command[0]) is not None
            assert command[-1] == environ["STILLFRESH_STORE__URL"]

    def test_the_systemd_unit_uses_existing_options(self) -> None:
        """Options that `serve` has; SIGHUP to reload; time to drain."""
        unit = configparser.RawConfigParser(strict=False)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read(DEPLOY / "stillfresh.service")
        service = unit["Service"]
        program, command, *arguments = shlex.split(service["ExecStart"])
        assert (Path(program).name, command) == ("stillfresh", "serve")
        assert {it for it in arguments if it.startswith("--")} <= OPTIONS
        serve.make_context("serve", arguments, help_option_names=HELP)
        assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
        assert int(service["TimeoutStopSec"]) >= 45

    async def test_the_kubernetes_manifest_uses_existing_paths_and_ports(self) -> None:
        """Probes of paths and ports that there are, and a grace that is longer than the drain."""
        parts = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
        deployment = next(it for it in parts if it["kind"] == "Deployment")
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        serve.make_context("serve", [*container["args"]], help_option_names=HELP)
        ports = {it["name"] for it in container["ports"]}
        async with client_of(gateway("memory://")) as client:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                request = container[probe]["httpGet"]
                assert (await client.get(request["path"])).status_code == 200
                assert request["port"] in ports
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
        drain = int(container["args"][1].removesuffix("s"))
        assert pod["terminationGracePeriodSeconds"] >= drain + 45
        environ = {it["name"]: it["value"] for it in container["env"] if "value" in it}
        assert told(environ).pages is not None
        service = next(it for it in parts if it["kind"] == "Service")
        assert service["spec"]["ports"][0]["targetPort"] in ports
        assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
