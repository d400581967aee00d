import io
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

# Answers /health and chat completions as vLLM does, after writing the lines it is given to its log.
FAKE_SERVER = """
import http.server, json, signal, sys
port, answer, *log = sys.argv[1:]
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, content):
        body = json.dumps(content).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.reply({})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["temperature"] == 0
        self.reply({"choices": [{"message": {"content": answer}}]})
print(*log, sep="\\n", flush=True)
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""
# A server whose worker ignores every polite request.
STUBBORN_WORKER = """
import signal, subprocess, sys, time
worker = '''
import signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print("up", flush=True)
time.sleep(99)
'''
child = subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE)
child.stdout.readline()
print("worker", child.pid, flush=True)
time.sleep(99)
"""


@pytest.fixture
def demo(load_script, monkeypatch, tmp_path):
    module = load_script("demo")
    monkeypatch.setattr(module, "LOG", tmp_path / "server.log")
    monkeypatch.setattr(module, "MODEL", tmp_path)
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 1.0)
    monkeypatch.setattr(module.signal, "signal", lambda *arguments: None)
    monkeypatch.delenv("PORT", raising=False)
    (tmp_path / "config.json").write_text("{}")
    return module


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "plan of [model].txt"
    path.write_text("rewritten: [q_proj, k_proj]\n")
    return path


def serve_fake(demo, monkeypatch, *log, answer="It is Paris."):
    command = [sys.executable, "-c", FAKE_SERVER]
    monkeypatch.setattr(demo, "serve_command", lambda port: [*command, str(port), answer, *log])


def runs(pid):
    """Whether process `pid` is there and not a zombie."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_prints_answer_and_plan(demo, monkeypatch, capsys, report):
    serve_fake(demo, monkeypatch, f"(Worker pid=7) INFO [base.py:1] tfbackend 0.1.0 serves it; report: {report}")
    assert demo.main() == 0
    printed = capsys.readouterr().out
    assert "answer   It is Paris." in printed
    assert "rewritten: [q_proj, k_proj]" in printed


def test_without_a_report_the_demo_fails_and_says_so(demo, monkeypatch, capsys):
    serve_fake(demo, monkeypatch, "INFO serving", "report: /nowhere/plan.txt")
    assert demo.main() == 1
    printed = capsys.readouterr()
    assert "It is Paris." in printed.out
    assert "names no `report:` file" in printed.err


def test_a_wrong_answer_fails(demo, monkeypatch, capsys, report):
    serve_fake(demo, monkeypatch, f"report: {report}", answer="It is Rome.")
    assert demo.main() == 1
    assert "should have said Paris" in capsys.readouterr().err


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(demo, monkeypatch, capsys):
    command = [sys.executable, "-c", "for i in range(40): print('line', i)\nraise SystemExit(3)"]
    monkeypatch.setattr(demo, "serve_command", lambda port: command)
    assert demo.main() == 1
    error = capsys.readouterr().err
    assert "ended with status 3" in error
    assert "line 39" in error
    assert "line 20" not in error


def test_a_server_that_never_answers_is_given_up(demo, monkeypatch, capsys):
    monkeypatch.setattr(demo, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(demo, "serve_command", lambda port: [sys.executable, "-c", "import time; time.sleep(99)"])
    assert demo.main() == 1
    assert "not ready after" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_refused_before_anything_starts(demo, monkeypatch, capsys, host):
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setenv("PORT", str(port))
        monkeypatch.setattr(demo, "serve_command", lambda port: pytest.fail("the server was started"))
        assert demo.main() == 1
    assert f"port {port} is taken" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["http", "80", "70000", "-1"])
def test_a_port_that_is_none_is_refused(demo, port):
    with pytest.raises(demo.DemoFailure, match=f"PORT={port} is not a port"):
        demo.choose_port(port)


def test_the_port_asked_for_is_used(demo):
    free = demo.choose_port(None)
    assert demo.choose_port(str(free)) == free


def test_without_a_checkpoint_it_says_how_to_get_one(demo, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "MODEL", tmp_path / "absent")
    with pytest.raises(demo.DemoFailure, match="make demo"):
        demo.run(Console(file=io.StringIO()))


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt, RuntimeError], ids=str)
def test_no_process_outlives_the_demo(demo, ending):
    pids = []

    def use_server():
        with demo.server([sys.executable, "-c", STUBBORN_WORKER], demo.LOG) as process:
            wait_for(lambda: "worker" in demo.LOG.read_text())
            pids.extend([process.pid, int(demo.LOG.read_text().split()[1])])
            if ending is not None:
                raise ending

    if ending is None:
        use_server()
    else:
        with pytest.raises(ending):
            use_server()
    wait_for(lambda: not any(map(runs, pids)))


def test_the_server_ends_when_the_demo_is_killed_outright(demo):
    code = (
        "import importlib.util as u, pathlib, sys, time\n"
        f"spec = u.spec_from_file_location('demo', {demo.__file__!r}); m = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(m)\n"
        f"with m.server([sys.executable, '-c', 'import time; time.sleep(99)'], pathlib.Path({str(demo.LOG)!r})) as p:\n"
        "    print(p.pid, flush=True); time.sleep(99)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert runs(pid)
    parent.kill()
    parent.wait()
    wait_for(lambda: not runs(pid))


def test_settings_of_the_user_win_over_the_demos(demo):
    environment = demo.server_environment({**os.environ, "VLLM_CPU_KVCACHE_SPACE": "3"})
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment["HF_HUB_OFFLINE"]


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("", "importing vLLM"),
        ("Resolved architecture: X\n", "starting the engine"),
        ("Resolved architecture: X\nStarting to load model /m...\n", "building the model and loading its weights"),
    ],
)
def test_the_waiting_line_names_the_stage(demo, log, says):
    assert demo.stage(log) == says
