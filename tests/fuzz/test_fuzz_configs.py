"""Whatever a config or --cfg-options say, it is read, or one line says why not."""

import argparse
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mutations import VALUES, bounded, changed, damaged, is_one_line
from toy import write_detection_config, write_segmentation_config

from mmnala.engine import tools
from mmnala.engine.model_check import check_model
from mmnala.engine.testing import check_slide


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp('fuzz')


@pytest.fixture(autouse=True)
def own_scope():
    yield
    DefaultScope._instance_dict.clear()


def tree(write_config, folder: Path) -> dict:
    """A config as JSON has it; it imports nothing."""
    cfg = Config.fromfile(write_config(folder / 'config.py', folder))
    content = json.loads(json.dumps(cfg.to_dict()))
    del content['custom_imports']
    return content


def read(path: Path, *options: str) -> None:
    def main() -> None:
        parser = tools.argument_parser('')
        arguments = [str(path), *(['--cfg-options', *options] if options else [])]
        cfg = tools.load_config(parser.parse_args(arguments))
        check_model(cfg.get('model') or {})
        check_slide((cfg.get('model') or {}).get('test_cfg') or {})

    with bounded():
        try:
            tools.run(main)
        except SystemExit as ended:
            assert is_one_line(ended.code) or ended.code == 2, ended.code


SMALL = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@pytest.mark.parametrize('write_config', [write_segmentation_config, write_detection_config])
@pytest.mark.parametrize('ending', ['json', 'yaml'])
def test_changed_configs(folder, write_config, ending):
    path = folder / f'config.{ending}'
    dump = dict(json=json.dumps, yaml=yaml.safe_dump)[ending]

    # A model is built, so that its sizes have to be small.
    @given(changed(tree(write_config, folder), SMALL))
    def check(content: object) -> None:
        path.write_text(dump(content))
        read(path)

    check()


def test_damaged_config_files(folder):
    path = folder / 'config.json'
    content = json.dumps(tree(write_segmentation_config, folder)).encode()

    @given(damaged(content))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    check()


def test_options(folder):
    content = tree(write_segmentation_config, folder)
    path = folder / 'config.json'
    path.write_text(json.dumps(content))
    names = ['model', 'backbone', 'arch', 'channels', 'decode_head', 'pipeline', '0', '-1', 'x', '']
    names += ['train_dataloader', 'dataset', 'data_root', 'work_dir', 'default_hooks']
    keys = st.lists(st.sampled_from(names), min_size=1, max_size=4).map('.'.join)
    values = SMALL.map(json.dumps).map(lambda text: text.replace(' ', ''))
    values |= st.text('[](),=\'"ab1.-', max_size=8)

    @given(st.lists(st.tuples(keys, values).map('='.join), min_size=1, max_size=3))
    def check(options: list[str]) -> None:
        read(path, *options)

    check()


@given(st.dictionaries(st.text(max_size=6), VALUES) | VALUES)
def test_namespaces_of_any_kind(folder, options):
    """A launcher, or another tool, may hand on anything."""
    path = folder / 'empty.py'
    path.write_text('')
    args = argparse.Namespace(
        config=str(path), cfg_options=options if isinstance(options, dict) else {}, work_dir=None,
        launcher='none', local_rank=0,
    )  # fmt: skip
    with bounded():
        try:
            tools.run(lambda: tools.load_config(args))
        except SystemExit as ended:
            assert is_one_line(ended.code)
