"""The example calls of the reference pages, in Python, for `buf curl` and in TypeScript, on the shared stack.

Examples use ids of resources that do not exist. If the gateway returns NOT_FOUND, it has accepted the request.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest

from docs.site.calls import ExampleCalls, methods_of
from docs.site.contracts import Contract, read_contracts
from fixtures.documented import DOCUMENTED_MODEL
from fixtures.source_tree import ROOT
from twinkle_client import TwinkleClient
from twinkle_client.administration import KeyAdministration
from twinkle_client.stack import StackState
from twinkle_services.gateway.credentials import Access, Scope, requirement_of

pytestmark = pytest.mark.timeout(300)
OTHER_CODES: Mapping[str, str] = {
    'AdapterService.TakeOver': 'INVALID_ARGUMENT',
    'CheckpointService.UploadCheckpoint': 'ABORTED',
    'SamplerService.Sleep': 'FAILED_PRECONDITION',
}
"""Other refusals: the stack has no second trainer, the upload ends early, and the torch engine cannot sleep."""
NODE_MODULES = ROOT / 'node_modules'
PACKAGE = ROOT / 'sdk' / 'typescript' / 'dist'
TYPESCRIPT = re.compile(r'^```ts\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SOME = ('SamplerService.Sample', 'FleetService.WatchFleet', 'AdapterService.GetAdapter', 'KeyService.CreateKey')
"""Methods with one response, many responses and no response, called as commands and from TypeScript."""


class Answered(Exception):
    """A program has printed the first response."""


@cache
def contracts() -> list[Contract]:
    """Return all contracts of the repository."""
    return read_contracts(ROOT / 'protos')


def examples(kind: str) -> dict[str, str]:
    """Return the example of each method that callers may use, by `Service.Method`; `kind` is a method of the writer."""
    calls = ExampleCalls(contracts())
    write: Callable[[Contract, str, Any], str] = getattr(calls, kind)
    return {
        f'{service}.{method.name}': write(contract, service, method)
        for contract, service, method in methods_of(contracts())
        if requirement_of(f'{contract.file.package}.{service}/{method.name}') is not Access.INTERNAL
    }


@pytest.fixture
def variables(tiny_stack: StackState) -> Mapping[str, str]:
    """Variables that the examples read: the address, and a key of a new tenant with all scopes."""
    with TwinkleClient(tiny_stack.address, tiny_stack.read_api_key()) as client:
        _, secret = KeyAdministration(client=client).create_key('reference', scopes=[scope.value for scope in Scope])
    return {'TWINKLE_SERVER_URL': tiny_stack.address, 'TWINKLE_API_KEY': secret}


def on_tiny_model(programs: Mapping[str, str], stack: StackState) -> dict[str, str]:
    """Replace the model in all examples by the model of the stack."""
    return {name: program.replace(DOCUMENTED_MODEL, stack.base_model) for name, program in programs.items()}


def code_of_python(program: str) -> str:
    """Run a program until its first response, and return the name of the status."""

    def stop(response: object) -> None:
        raise Answered(str(response))

    try:
        exec(compile(program, 'example', 'exec'), {'print': stop})
    except grpc.RpcError as error:
        code: Any = getattr(error, 'code', None)
        return str(code().name)
    except Answered:
        pass
    return 'OK'


def first_line(command: list[str] | str, folder: Path, variables: Mapping[str, str]) -> tuple[str, str]:
    """Run a command until it prints a line; return the line, and the errors if there is no line."""
    path = os.pathsep.join([str(Path(sys.prefix, 'bin')), os.environ['PATH']])
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, 'PATH': path, **variables},
        shell=isinstance(command, str),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        if line:
            # The command follows a stream that does not end.
            os.killpg(process.pid, 15)
        return line, '' if line else process.stderr.read()


def code_of_curl(command: str, folder: Path, variables: Mapping[str, str]) -> str:
    """Run a command of `buf curl`, and return the name of the status."""
    line, errors = first_line(command, folder, variables)
    if line:
        return 'OK'
    assert errors.startswith('{'), errors
    return str(json.loads(errors)['code']).upper()


def assert_accepted(codes: Mapping[str, str]) -> None:
    """Check that each method succeeded, or refused the example only because its resource does not exist."""
    refused = {name: code for name, code in codes.items() if code not in {'OK', 'NOT_FOUND'}}
    assert refused == {name: code for name, code in OTHER_CODES.items() if name in codes}


def test_every_python_example_is_accepted(
    tiny_stack: StackState, variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway parses and executes the request of every method that has an example."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    programs = on_tiny_model(examples('python'), tiny_stack)
    codes = {name: code_of_python(program) for name, program in programs.items()}
    assert_accepted(codes)
    assert list(codes.values()).count('OK') > 30
    assert len(codes) > 80


def test_some_commands_are_accepted(tiny_stack: StackState, variables: Mapping[str, str], tmp_path: Path) -> None:
    """`buf curl` reads the messages by reflection, prints responses, and reports refusals."""
    commands = on_tiny_model(examples('curl'), tiny_stack)
    assert_accepted({name: code_of_curl(commands[name], tmp_path, variables) for name in SOME})


@pytest.mark.slow
def test_every_command_is_accepted(tiny_stack: StackState, variables: Mapping[str, str], tmp_path: Path) -> None:
    """The command of each method gets the same response as its Python program."""
    commands = on_tiny_model(examples('curl'), tiny_stack)
    assert_accepted({name: code_of_curl(command, tmp_path, variables) for name, command in commands.items()})


def compile_typescript(folder: Path, programs: Mapping[str, str]) -> None:
    """Write programs to a folder, and compile them with strict types to JavaScript for Node.js."""
    assert PACKAGE.exists(), 'the TypeScript package is not built; run ./run console'
    (folder / 'node_modules').symlink_to(NODE_MODULES)
    for name, program in programs.items():
        (folder / f'{name}.ts').write_text(program)
    options = {
        'strict': True,
        'target': 'es2023',
        'module': 'nodenext',
        'types': ['node'],
        'skipLibCheck': True,
        'outDir': 'js',
    }
    (folder / 'tsconfig.json').write_text(json.dumps({'compilerOptions': options, 'include': ['*.ts']}))
    (folder / 'package.json').write_text('{"type": "module"}')
    run_node(['node_modules/typescript/bin/tsc'], folder)


def run_node(arguments: list[str], folder: Path) -> None:
    """Run a program of Node.js, which must succeed."""
    done = subprocess.run(['node', *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_typescript_example_compiles(tmp_path: Path) -> None:
    """The strict compiler accepts all examples with the types of the package."""
    compile_typescript(tmp_path, examples('typescript'))


def test_documented_typescript_compiles(tmp_path: Path) -> None:
    """The strict compiler accepts the blocks of each page about the package as one program."""
    pages = {page.stem: page.read_text() for page in (ROOT / 'docs/typescript.md', ROOT / 'sdk/typescript/README.md')}
    programs = {name: '\n'.join(TYPESCRIPT.findall(text)) for name, text in pages.items()}
    assert all(programs.values())
    compile_typescript(tmp_path, programs)


@pytest.mark.slow
def test_typescript_examples_run(tiny_stack: StackState, variables: Mapping[str, str], tmp_path: Path) -> None:
    """Programs with the package get the same responses as their Python programs."""
    written = on_tiny_model(examples('typescript'), tiny_stack)
    programs = {name: written[name] for name in SOME}
    compile_typescript(tmp_path, programs)
    codes: dict[str, str] = {}
    for name in programs:
        line, errors = first_line(['node', f'js/{name}.js'], tmp_path, variables)
        refused = re.search(r'NotFoundError: ', errors)
        assert line or refused, errors
        codes[name] = 'OK' if line else 'NOT_FOUND'
    assert_accepted(codes)
