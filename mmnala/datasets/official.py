"""Classes, ids and counts of ADE20K (the scene-parsing challenge), COCO 2017 and Cityscapes, and
a few of ImageNet-1K.

The tables are here, and not read from mmseg, mmdet or cityscapesscripts, so that data can be
written and checked without them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Index 1 of the label maps is the first; 0 is unlabelled.
ADE20K_CLASSES = (
    'wall', 'building', 'sky', 'floor', 'tree', 'ceiling', 'road', 'bed', 'windowpane', 'grass',
    'cabinet', 'sidewalk', 'person', 'earth', 'door', 'table', 'mountain', 'plant', 'curtain',
    'chair', 'car', 'water', 'painting', 'sofa', 'shelf', 'house', 'sea', 'mirror', 'rug', 'field',
    'armchair', 'seat', 'fence', 'desk', 'rock', 'wardrobe', 'lamp', 'bathtub', 'railing',
    'cushion', 'base', 'box', 'column', 'signboard', 'chest of drawers', 'counter', 'sand', 'sink',
    'skyscraper', 'fireplace', 'refrigerator', 'grandstand', 'path', 'stairs', 'runway', 'case',
    'pool table', 'pillow', 'screen door', 'stairway', 'river', 'bridge', 'bookcase', 'blind',
    'coffee table', 'toilet', 'flower', 'book', 'hill', 'bench', 'countertop', 'stove', 'palm',
    'kitchen island', 'computer', 'swivel chair', 'boat', 'bar', 'arcade machine', 'hovel', 'bus',
    'towel', 'light', 'truck', 'tower', 'chandelier', 'awning', 'streetlight', 'booth',
    'television receiver', 'airplane', 'dirt track', 'apparel', 'pole', 'land', 'bannister',
    'escalator', 'ottoman', 'bottle', 'buffet', 'poster', 'stage', 'van', 'ship', 'fountain',
    'conveyer belt', 'canopy', 'washer', 'plaything', 'swimming pool', 'stool', 'barrel', 'basket',
    'waterfall', 'tent', 'bag', 'minibike', 'cradle', 'oven', 'ball', 'food', 'step', 'tank',
    'trade name', 'microwave', 'pot', 'animal', 'bicycle', 'lake', 'dishwasher', 'screen',
    'blanket', 'sculpture', 'hood', 'sconce', 'vase', 'traffic light', 'tray', 'ashcan', 'fan',
    'pier', 'crt screen', 'plate', 'monitor', 'bulletin board', 'shower', 'radiator', 'glass',
    'clock', 'flag',
)  # fmt: skip
ADE20K_PREFIXES = {'training': 'ADE_train_', 'validation': 'ADE_val_'}
ADE20K_COUNTS = {'training': 20210, 'validation': 2000}

_COCO_SUPERCATEGORIES = {
    'person': {1: 'person'},
    'vehicle': {
        2: 'bicycle', 3: 'car', 4: 'motorcycle', 5: 'airplane', 6: 'bus', 7: 'train', 8: 'truck',
        9: 'boat',
    },
    'outdoor': {
        10: 'traffic light', 11: 'fire hydrant', 13: 'stop sign', 14: 'parking meter', 15: 'bench',
    },
    'animal': {
        16: 'bird', 17: 'cat', 18: 'dog', 19: 'horse', 20: 'sheep', 21: 'cow', 22: 'elephant',
        23: 'bear', 24: 'zebra', 25: 'giraffe',
    },
    'accessory': {27: 'backpack', 28: 'umbrella', 31: 'handbag', 32: 'tie', 33: 'suitcase'},
    'sports': {
        34: 'frisbee', 35: 'skis', 36: 'snowboard', 37: 'sports ball', 38: 'kite',
        39: 'baseball bat', 40: 'baseball glove', 41: 'skateboard', 42: 'surfboard',
        43: 'tennis racket',
    },
    'kitchen': {
        44: 'bottle', 46: 'wine glass', 47: 'cup', 48: 'fork', 49: 'knife', 50: 'spoon', 51: 'bowl',
    },
    'food': {
        52: 'banana', 53: 'apple', 54: 'sandwich', 55: 'orange', 56: 'broccoli', 57: 'carrot',
        58: 'hot dog', 59: 'pizza', 60: 'donut', 61: 'cake',
    },
    'furniture': {
        62: 'chair', 63: 'couch', 64: 'potted plant', 65: 'bed', 67: 'dining table', 70: 'toilet',
    },
    'electronic': {
        72: 'tv', 73: 'laptop', 74: 'mouse', 75: 'remote', 76: 'keyboard', 77: 'cell phone',
    },
    'appliance': {78: 'microwave', 79: 'oven', 80: 'toaster', 81: 'sink', 82: 'refrigerator'},
    'indoor': {
        84: 'book', 85: 'clock', 86: 'vase', 87: 'scissors', 88: 'teddy bear', 89: 'hair drier',
        90: 'toothbrush',
    },
}  # fmt: skip
# As they stand in the annotation files.
COCO_CATEGORIES: tuple[dict[str, Any], ...] = tuple(
    {'supercategory': supercategory, 'id': category_id, 'name': name}
    for supercategory, names in _COCO_SUPERCATEGORIES.items()
    for category_id, name in names.items()
)
COCO_COUNTS = {'train2017': 118287, 'val2017': 5000}
COCO_ANNOTATED_COUNTS = {'train2017': 117266, 'val2017': 4952}


class CityscapesLabel(NamedTuple):
    """A row of Cityscapes' label table; ``colour`` is RGB."""

    name: str
    id: int
    train_id: int
    has_instances: bool
    colour: tuple[int, int, int]


# All that label maps can hold: 'license plate' (-1) is never drawn into one.
CITYSCAPES_LABELS = (
    CityscapesLabel('unlabeled', 0, 255, False, (0, 0, 0)),
    CityscapesLabel('ego vehicle', 1, 255, False, (0, 0, 0)),
    CityscapesLabel('rectification border', 2, 255, False, (0, 0, 0)),
    CityscapesLabel('out of roi', 3, 255, False, (0, 0, 0)),
    CityscapesLabel('static', 4, 255, False, (0, 0, 0)),
    CityscapesLabel('dynamic', 5, 255, False, (111, 74, 0)),
    CityscapesLabel('ground', 6, 255, False, (81, 0, 81)),
    CityscapesLabel('road', 7, 0, False, (128, 64, 128)),
    CityscapesLabel('sidewalk', 8, 1, False, (244, 35, 232)),
    CityscapesLabel('parking', 9, 255, False, (250, 170, 160)),
    CityscapesLabel('rail track', 10, 255, False, (230, 150, 140)),
    CityscapesLabel('building', 11, 2, False, (70, 70, 70)),
    CityscapesLabel('wall', 12, 3, False, (102, 102, 156)),
    CityscapesLabel('fence', 13, 4, False, (190, 153, 153)),
    CityscapesLabel('guard rail', 14, 255, False, (180, 165, 180)),
    CityscapesLabel('bridge', 15, 255, False, (150, 100, 100)),
    CityscapesLabel('tunnel', 16, 255, False, (150, 120, 90)),
    CityscapesLabel('pole', 17, 5, False, (153, 153, 153)),
    CityscapesLabel('polegroup', 18, 255, False, (153, 153, 153)),
    CityscapesLabel('traffic light', 19, 6, False, (250, 170, 30)),
    CityscapesLabel('traffic sign', 20, 7, False, (220, 220, 0)),
    CityscapesLabel('vegetation', 21, 8, False, (107, 142, 35)),
    CityscapesLabel('terrain', 22, 9, False, (152, 251, 152)),
    CityscapesLabel('sky', 23, 10, False, (70, 130, 180)),
    CityscapesLabel('person', 24, 11, True, (220, 20, 60)),
    CityscapesLabel('rider', 25, 12, True, (255, 0, 0)),
    CityscapesLabel('car', 26, 13, True, (0, 0, 142)),
    CityscapesLabel('truck', 27, 14, True, (0, 0, 70)),
    CityscapesLabel('bus', 28, 15, True, (0, 60, 100)),
    CityscapesLabel('caravan', 29, 255, True, (0, 0, 90)),
    CityscapesLabel('trailer', 30, 255, True, (0, 0, 110)),
    CityscapesLabel('train', 31, 16, True, (0, 80, 100)),
    CityscapesLabel('motorcycle', 32, 17, True, (0, 0, 230)),
    CityscapesLabel('bicycle', 33, 18, True, (119, 11, 32)),
)
CITYSCAPES_COUNTS = {'train': 2975, 'val': 500, 'test': 1525}
CITYSCAPES_CITIES = {
    'train': (
        'aachen', 'bochum', 'bremen', 'cologne', 'darmstadt', 'dusseldorf', 'erfurt', 'hamburg',
        'hanover', 'jena', 'krefeld', 'monchengladbach', 'strasbourg', 'stuttgart', 'tubingen',
        'ulm', 'weimar', 'zurich',
    ),
    'val': ('frankfurt', 'lindau', 'munster'),
    'test': ('berlin', 'bielefeld', 'bonn', 'leverkusen', 'mainz', 'munich'),
}  # fmt: skip

# Of the thousand classes of ImageNet-1K those that drawn objects stand for: WordNet id and label.
IMAGENET_SYNSETS = {
    'starfish': ('n02317335', 327),
    'soccer ball': ('n04254680', 805),
    'stone wall': ('n04326547', 825),
    'volleyball': ('n04540053', 890),
    'window screen': ('n04589890', 904),
    'book jacket': ('n07248320', 921),
}
