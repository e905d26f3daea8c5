"""Unit tests of plugins: the policy that allows them, their digests, and the import of their modules."""

import py_compile
import sys
from pathlib import Path

import pytest

from twinkle.component import ComponentRegistry, InvalidComponent, UnknownComponent
from twinkle.hub import PluginNotFound
from twinkle.loss import Loss, build_loss
from twinkle.plugin import (
    Plugin,
    PluginRefused,
    allow_plugins,
    allowed_plugins,
    keep_plugins_out,
    load_function,
    trust_remote_code,
)
from twinkle.preprocessor import build_filter, build_preprocessor
from twinkle.reward import build_reward
from twinkle.template import UnknownTemplate, build_template


class Shape:
    """Base class of the plugins in these tests."""

    def area(self) -> float:
        """Return the area of the shape."""
        raise NotImplementedError


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a hub mirror, with all plugins disallowed."""
    monkeypatch.setenv('TWINKLE_HUB_DIR', str(tmp_path))
    monkeypatch.setenv('TWINKLE_CACHE_DIR', str(tmp_path / 'cache'))
    monkeypatch.setenv('TWINKLE_TRUST_REMOTE_CODE', '0')
    monkeypatch.setenv('TWINKLE_PLUGINS', '')
    return tmp_path


def write(hub: Path, name: str, code: str, **modules: str) -> str:
    """Write a plugin to the mirror and return its id."""
    folder = hub / 'models' / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / '__init__.py').write_text(code)
    for module, text in modules.items():
        (folder / f'{module}.py').write_text(text)
    return f'ms://{name}'


def shape(area: float) -> str:
    """Return the code of a plugin that defines a shape."""
    return f"""
from {__name__} import Shape

class Square(Shape):
    def area(self):
        return {area}
"""


def plugin_modules() -> set[str]:
    """Return the names of the imported plugin modules."""
    return {name for name in sys.modules if name.startswith('twinkle_plugin_')}


def test_nothing_is_loaded_unless_it_is_allowed(hub: Path) -> None:
    """Plugins are disabled by default, load only if they are allowed by name, and do not run if they are refused."""
    plugin = write(hub, 'me/square', shape(4.0))
    before = plugin_modules()
    for refuse in (lambda: Plugin.load_plugin(plugin, Shape), lambda: load_function(plugin, 'Square')):
        with pytest.raises(PluginRefused, match='me/square'):
            refuse()
    allow_plugins('ms://me/other')
    with pytest.raises(PluginRefused):
        Plugin.load_plugin(plugin, Shape)
    assert plugin_modules() == before
    with allowed_plugins(plugin):
        assert Plugin.load_plugin(plugin, Shape)().area() == 4.0
    with pytest.raises(PluginRefused):
        Plugin.load_plugin(plugin, Shape)


def test_all_are_allowed_by_one_variable_and_none_in_a_service(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`TWINKLE_TRUST_REMOTE_CODE=1` allows all plugins except in a service, and an invalid value is refused."""
    plugin = write(hub, 'me/square', shape(4.0))
    monkeypatch.setenv('TWINKLE_TRUST_REMOTE_CODE', '1')
    assert Plugin.load_plugin(plugin, Shape)().area() == 4.0
    keep_plugins_out()
    assert not trust_remote_code()
    with pytest.raises(PluginRefused):
        Plugin.load_plugin(plugin, Shape)
    monkeypatch.setenv('TWINKLE_TRUST_REMOTE_CODE', 'perhaps')
    with pytest.raises(PluginRefused, match='perhaps'):
        Plugin.load_plugin(plugin, Shape)


def test_two_plugins_of_one_layout_do_not_mix(hub: Path) -> None:
    """Two plugins have separate modules; unchanged code is imported once, and changed code is imported again."""
    code = f'from {__name__} import Shape\nfrom .side import SIDE\n'
    code += 'class Square(Shape):\n    def area(self):\n        return SIDE**2\n'
    one = write(hub, 'me/one', code, side='SIDE = 1.0\n')
    two = write(hub, 'me/two', code, side='SIDE = 2.0\n')
    allow_plugins(one, two)
    first, second = Plugin.load_plugin(one, Shape), Plugin.load_plugin(two, Shape)
    assert (first().area(), second().area(), first is second) == (1.0, 4.0, False)
    assert Plugin.load_plugin(one, Shape) is first
    write(hub, 'me/one', code, side='SIDE = 3.0\n')
    assert (Plugin.load_plugin(one, Shape)().area(), first().area()) == (9.0, 1.0)


def test_only_code_with_the_allowed_digest_runs(hub: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An id with the logged digest allows only that code; a digest prefix that is too short is refused."""
    plugin = write(hub, 'me/square', shape(4.25))
    with allowed_plugins(plugin), caplog.at_level('INFO', logger='twinkle'):
        Plugin.load_plugin(plugin, Shape)
    (logged,) = [record.args for record in caplog.records]
    assert logged[0] == plugin
    digest = logged[1]
    with allowed_plugins(f'{plugin}@{digest[:12]}'):
        assert Plugin.load_plugin(plugin, Shape)().area() == 4.25
        write(hub, 'me/square', shape(5.0))
        with pytest.raises(PluginRefused, match=digest[:12]):
            Plugin.load_plugin(plugin, Shape)
    write(hub, 'me/square', shape(4.25))
    with allowed_plugins(f'{plugin}@{digest[:4]}'), pytest.raises(PluginRefused):
        Plugin.load_plugin(plugin, Shape)


def test_data_files_change_the_digest_and_compiled_code_is_refused(hub: Path) -> None:
    """A JSON file is part of a plugin's digest, a README is not, and compiled code is refused."""
    plugin = write(hub, 'me/square', shape(4.0))
    folder = hub / 'models' / 'me' / 'square'
    allow_plugins(plugin)
    first = Plugin.load_plugin(plugin, Shape)
    (folder / 'README.md').write_text('hello')
    assert Plugin.load_plugin(plugin, Shape) is first
    (folder / 'table.json').write_text('{}')
    assert Plugin.load_plugin(plugin, Shape) is not first
    (folder / 'side.so').write_bytes(b'code')
    with pytest.raises(PluginRefused, match=r'side\.so'):
        Plugin.load_plugin(plugin, Shape)


def test_a_digest_is_enforced_if_all_plugins_are_allowed(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong or empty digest refuses the plugin even if `TWINKLE_TRUST_REMOTE_CODE` is 1."""
    plugin = write(hub, 'me/square', shape(4.5))
    monkeypatch.setenv('TWINKLE_TRUST_REMOTE_CODE', '1')
    for entry in (f'{plugin}@{"0" * 12}', f'{plugin}@'):
        with allowed_plugins(entry), pytest.raises(PluginRefused):
            Plugin.load_plugin(plugin, Shape)
    with pytest.raises(PluginRefused, match='comma'):
        allow_plugins('./a,hf://you/other')


def test_the_code_that_runs_is_the_code_in_the_digest(hub: Path) -> None:
    """Source files in `__pycache__` are part of a plugin. Bytecode, and files that change after loading, do not run."""
    code = f'from {__name__} import Shape\nfrom .__pycache__.side import SIDE\n'
    code += 'class Square(Shape):\n    def area(self):\n        from . import late\n        return SIDE + late.LATE\n'
    plugin = write(hub, 'me/cached', code, late='LATE = 0.5\n')
    folder = hub / 'models' / 'me' / 'cached'
    (folder / '__pycache__').mkdir()
    (folder / '__pycache__' / 'side.py').write_text('SIDE = 1.0\n')
    (folder / 'late.py').write_text('LATE = 100.0\n')
    py_compile.compile(str(folder / 'late.py'), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    (folder / 'late.py').write_text('LATE = 0.5\n')
    allow_plugins(plugin)
    first = Plugin.load_plugin(plugin, Shape)
    (folder / 'late.py').write_text('LATE = 7.0\n')
    assert first().area() == 1.5
    (folder / '__pycache__' / 'side.py').write_text('SIDE = 2.0\n')
    assert Plugin.load_plugin(plugin, Shape)().area() == 9.0


def test_modules_of_a_plugin_are_found_in_its_folders_only(hub: Path, tmp_path: Path) -> None:
    """Modules are imported from packages and plain folders, and a link to another folder is refused."""
    code = f'from {__name__} import Shape\nfrom .inner.deep import SIDE\nfrom .plain import more\n'
    code += 'class Square(Shape):\n    def area(self):\n        return SIDE + more.MORE\n'
    plugin = write(hub, 'me/folders', code)
    folder = hub / 'models' / 'me' / 'folders'
    for name, text in {'inner/__init__.py': '', 'inner/deep.py': 'SIDE = 1\n', 'plain/more.py': 'MORE = 2\n'}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    allow_plugins(plugin)
    assert Plugin.load_plugin(plugin, Shape)().area() == 3
    write(hub, 'me/folders', 'from . import absent\n')
    with pytest.raises(ImportError):
        Plugin.load_plugin(plugin, Shape)
    (tmp_path / 'elsewhere').mkdir()
    (folder / 'side').symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(PluginRefused, match='side'):
        Plugin.load_plugin(plugin, Shape)


@pytest.mark.parametrize(
    'code',
    [
        '',
        f'from {__name__} import Shape\n',
        'class Square:\n    pass\n',
        shape(1.0) + 'class Circle(Shape):\n    pass\n',
    ],
)
def test_a_plugin_must_define_exactly_one_class_of_the_kind(hub: Path, code: str) -> None:
    """A plugin is refused if it defines no subclass of the base class, defines two, or only imports one."""
    plugin = write(hub, 'me/other', code)
    allow_plugins(plugin)
    with pytest.raises(PluginRefused, match='Shape'):
        Plugin.load_plugin(plugin, Shape)


def test_a_failed_import_leaves_no_modules_behind(hub: Path) -> None:
    """An error of a plugin reaches the caller, and a corrected plugin loads."""
    plugin = write(hub, 'me/broken', 'from . import half\nraise KeyError(1)\n', half='')
    allow_plugins(plugin)
    before = plugin_modules()
    with pytest.raises(KeyError):
        Plugin.load_plugin(plugin, Shape)
    assert plugin_modules() == before
    write(hub, 'me/broken', shape(2.0))
    assert Plugin.load_plugin(plugin, Shape)().area() == 2.0


def test_a_folder_can_be_a_plugin(hub: Path) -> None:
    """A path works like a hub id; a folder without `__init__.py` and a malformed id raise PluginNotFound."""
    write(hub, 'me/square', shape(4.0))
    folder = str(hub / 'models' / 'me' / 'square')
    allow_plugins(folder, str(hub), 'ms://no id')
    assert Plugin.load_plugin(folder, Shape)().area() == 4.0
    for missing in (str(hub), 'ms://no id'):
        with pytest.raises(PluginNotFound):
            Plugin.load_plugin(missing, Shape)


CODE = """
from twinkle.loss import CrossEntropyLoss
from twinkle.preprocessor import DataFilter, Preprocessor
from twinkle.reward import Reward
from twinkle.template import Template

class MyLoss(CrossEntropyLoss): pass
class MyTemplate(Template): pass
class MyReward(Reward):
    def __call__(self, trajectories, **kwargs): return [1.0 for _ in trajectories]
class MyPreprocessor(Preprocessor):
    def __call__(self, rows): return rows
class MyFilter(DataFilter):
    def __call__(self, row): return False

def twice(x): return 2 * x
"""


def test_components_can_be_built_by_plugin_id(hub: Path, tiny_llama_dir: Path) -> None:
    """One plugin can provide losses, rewards, templates, preprocessors and filters, each built by the plugin's id."""
    plugin = write(hub, 'me/parts', CODE)
    with pytest.raises(PluginRefused):
        build_loss(plugin)
    allow_plugins(plugin)
    assert isinstance(build_loss(plugin), Loss)
    assert build_reward(plugin)([{}]) == [1.0]
    assert type(build_template(plugin, model_id=str(tiny_llama_dir))).__name__ == 'MyTemplate'
    assert type(build_preprocessor(plugin)).__name__ == 'MyPreprocessor'
    assert type(build_filter(plugin)).__name__ == 'MyFilter'
    assert load_function(plugin, 'twice')(4) == 8
    with pytest.raises(PluginRefused, match='thrice'):
        load_function(plugin, 'thrice')


def test_a_service_loads_only_listed_plugins(hub: Path) -> None:
    """A registry of a service builds only listed plugins, names them by id, and refuses changed code."""
    plugin = write(hub, 'me/square', shape(4.0))
    shapes: ComponentRegistry[Shape] = ComponentRegistry('shape', Shape, ())
    keep_plugins_out()
    shapes.load_plugins([plugin])
    built = shapes.build(plugin, {})
    assert (built.area(), shapes.name_of(built), shapes.names) == (4.0, plugin, (plugin,))
    with pytest.raises(UnknownComponent):
        shapes.build(write(hub, 'me/other', shape(5.0)), {})
    with pytest.raises(UnknownTemplate):
        build_template(str(hub), model_id='org/model')
    digest = type(built).__module__.removeprefix('twinkle_plugin_')
    shapes.load_plugins([f'{plugin}@{digest}'])
    write(hub, 'me/square', shape(6.0))
    with pytest.raises(InvalidComponent):
        shapes.load_plugins([plugin])
