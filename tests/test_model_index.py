"""model-index.yml and the metafiles: their form, and that they say what the configs say."""

from collections import Counter
from pathlib import Path

import pytest
import yaml
from mmengine.config import Config

ROOT = Path(__file__).parents[1]
LEAVES = {path for path in (ROOT / 'configs').rglob('*.py') if '_base_' not in path.parts}
INDEX = yaml.safe_load((ROOT / 'model-index.yml').read_text())
MODELS = {
    metafile: yaml.safe_load((ROOT / metafile).read_text())['Models']
    for metafile in INDEX['Import']
}
DATA = dict(
    ade20k='ADE20K', bccd='BCCD', camvid='CamVid', cityscapes='Cityscapes', coco='COCO',
    imagenet='ImageNet-1K', shapes='Shapes',
)  # fmt: skip

PAPER = {'Title', 'URL'}
COLLECTION = {'Name', 'Paper'}, {'README'}
MODEL = {'Name', 'In Collection', 'Config', 'Metadata'}, {'Results', 'Weights', 'Training Log'}
METADATA = {'Training Data', 'Batch Size', 'Architecture'}, {'Training Resources'}
RESULT = {'Task', 'Dataset', 'Metrics'}


MODEL_CASES = [
    pytest.param(metafile, model, id=model['Name'])
    for metafile, entries in MODELS.items()
    for model in entries
]


def has_keys(entry: dict, required: set, optional: set = frozenset()) -> bool:
    return required <= entry.keys() <= required | optional


def test_every_metafile_is_imported_and_holds_models_alone():
    metafiles = {str(path.relative_to(ROOT)) for path in (ROOT / 'configs').rglob('*.yml')}
    assert INDEX.keys() == {'Collections', 'Import'}
    assert set(INDEX['Import']) == metafiles
    assert len(INDEX['Import']) == len(metafiles)
    for metafile in metafiles:
        assert yaml.safe_load((ROOT / metafile).read_text()).keys() == {'Models'}


def test_every_config_is_listed_once():
    listed = Counter(ROOT / model['Config'] for entries in MODELS.values() for model in entries)
    assert set(listed) == LEAVES
    assert set(listed.values()) == {1}


def test_names_are_unique():
    names = Counter(model['Name'] for entries in MODELS.values() for model in entries)
    assert set(names.values()) == {1}


def test_collections():
    names = [collection['Name'] for collection in INDEX['Collections']]
    used = {model['In Collection'] for entries in MODELS.values() for model in entries}
    assert sorted(names) == sorted(used)
    for collection in INDEX['Collections']:
        assert has_keys(collection, *COLLECTION)
        assert collection['Paper'].keys() == PAPER
        assert collection['Paper']['URL'].startswith('https://arxiv.org/abs/')
        assert (ROOT / collection.get('README', 'README.md')).is_file()


@pytest.mark.parametrize(('metafile', 'model'), MODEL_CASES)
def test_model(metafile, model):
    assert has_keys(model, *MODEL)
    assert model['Name'] == Path(model['Config']).stem
    cfg = Config.fromfile(ROOT / model['Config'])
    length, limit = (
        ('Epochs', 'max_epochs') if 'max_epochs' in cfg.train_cfg else ('Iterations', 'max_iters')
    )
    metadata = model['Metadata']
    assert has_keys(metadata, METADATA[0] | {length}, METADATA[1])
    assert metadata['Training Data'] == DATA[Path(metafile).parent.name]
    assert metadata['Batch Size'] == cfg.auto_scale_lr.base_batch_size
    assert metadata[length] == cfg.train_cfg[limit]

    backbone = metadata['Architecture'][0]
    assert (model['In Collection'] == 'NaLaFormer') == (cfg.model.backbone.type == 'NaLaFormer')
    if cfg.model.backbone.type == 'NaLaFormer':
        assert backbone == f'NaLaFormer-{cfg.model.backbone.arch.upper()}'
    else:
        assert backbone.startswith(model['In Collection'] + '-')

    for result in model.get('Results', []):
        assert has_keys(result, RESULT)
        assert result['Dataset'] == metadata['Training Data']
        assert all(isinstance(value, float) for value in result['Metrics'].values())
