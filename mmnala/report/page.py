"""The report on a training: one HTML page that needs no other file and no network."""

import base64
import io
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from PIL import Image
from torch import nn

from .drawing import draw_classes, draw_confusion, draw_curves, png, usual_curves
from .evaluation import IOU_THR, MEAN_IOU, NO_OBJECT, SCORE_THR, CollectHook, Judged
from .log import ClassTable, RunLog

# The policy lets a browser load nothing at all, whatever the page contains.
TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ name }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff;
  max-width: 72rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: .5rem 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
p { margin: .5rem 0; } .note { color: #57606a; font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #d8dee4; text-align: right; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; display: block; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); }
.strip { display: grid; gap: .25rem; grid-template-columns: repeat(3, minmax(0, 1fr)); }
figure { margin: 0 0 1.25rem; max-width: 52rem; } figcaption { font-size: .85rem; color: #57606a; }
.strip img { width: 100%; }
.chip { display: inline-block; margin-right: 1rem; white-space: nowrap; font-size: .9rem; }
.chip i { display: inline-block; width: .9rem; height: .9rem; margin-right: .3rem;
  border: 1px solid #8c959f; vertical-align: -.1rem; }
pre { font-size: .8rem; overflow-x: auto; background: #f6f8fa; padding: .75rem; }
summary { cursor: pointer; }
</style>
</head>
<body>
<h1>{{ name }}</h1>
<p class="note">{{ subtitle }}</p>

{% macro table_of(table) %}
<div class="scroll"><table>
<tr><th>{{ table.first }}</th>
{% for column in table.columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for label, values in table.rows.items() %}
<tr><td>{{ label }}</td>{% for value in values %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endmacro %}

<h2>Result</h2>
<p class="note">{{ results_of }}</p>
{% if results.rows %}{{ table_of(results) }}
{% else %}<p>The evaluation gave no metrics.</p>{% endif %}

<h2>Curves</h2>
<div class="grid">
{% for title, image in curves.items() %}
<img src="{{ image }}" alt="{{ title }}">
{% else %}
<p class="note">The log has none of the usual curves.</p>
{% endfor %}
</div>

<h2>Classes</h2>
{% if classes %}
{% if bars %}<p><img src="{{ bars }}" alt="bars of the classes"></p>{% endif %}
{{ table_of(classes) }}
{% else %}
<p class="note">No figures of the classes were logged.</p>
{% endif %}

<h2>Confusion</h2>
{% if confusion %}
<p class="note">Percent of each true class, the row.
{%- if box_rule %} Boxes with a score from {{ box_rule.score }} find the object that they overlap
most, at an IoU from {{ box_rule.iou }}; each object is found once. The last column are missed
objects, the last row boxes without an object.
{%- endif %}</p>
<img src="{{ confusion }}" alt="confusion matrix">
{{ table_of(confusions) }}
{% else %}
<p class="note">{{ no_confusion }}</p>
{% endif %}

{% if palette %}
<h2>Colours</h2>
<p>{% for label, colour in palette.items() %}<span class="chip"><i style="background:{{ colour }}">
</i>{{ label }}</span> {% endfor %}</p>
{% endif %}
{% for title, judged in images.items() %}
<h2>{{ title }}</h2>
{% for image in judged %}
<figure>
<div class="strip">
{% for caption, panel in image.panels.items() %}
<div><img src="{{ panel }}" alt="{{ caption }}"><figcaption>{{ caption }}</figcaption></div>
{% endfor %}
</div>
<figcaption title="{{ image.path }}">{{ image.name }}: {{ measure }} {{ image.score }}</figcaption>
</figure>
{% else %}
<p class="note">None but the above.</p>
{% endfor %}
{% else %}
<h2>Best and worst images</h2>
<p class="note">{{ no_images }}</p>
{% endfor %}

<h2>Speed and memory</h2>
{{ table_of(speed) }}

<h2>Environment</h2>
{% if environment %}<details><summary>As logged</summary><pre>{{ environment }}</pre></details>
{% else %}<p class="note">The log says nothing about it.</p>{% endif %}

<h2>Config</h2>
<details><summary>The whole config</summary><pre>{{ config }}</pre></details>
</body>
</html>
"""


def render(
    run: RunLog,
    model: nn.Module,
    collected: CollectHook | None = None,
    metrics: Mapping[str, float] | None = None,
    checkpoint: str = '',
) -> str:
    """The page.

    Args:
        run: The training's log. Its ``table`` is shown as the classes' figures.
        model: The model, for its parameters.
        collected: What a validation of the checkpoint left; None for a page without images.
        metrics: What that validation measured.
        checkpoint: Its name.
    """
    if collected is None or metrics is None:
        metrics = run.metrics
        results_of = 'The last evaluation in the log.'
        why_not = 'Left out: the validation set was not evaluated.'
    else:
        results_of = f'The checkpoint {checkpoint} on the validation set.'
        why_not = 'Not available for this task.'
    table = run.table
    confusion = None if collected is None else collected.confusion
    names = [] if collected is None else collected.names
    of_boxes = NO_OBJECT in names[len(names) - 1 :]
    if table is None and confusion is not None and not of_boxes:
        recall = 100 * confusion.diagonal() / np.maximum(confusion.sum(1), 1)
        table = ClassTable(['Acc'], {n: [v] for n, v in zip(names, recall, strict=True)})
        run = RunLog(run.name, run.parts, run.curves, table)
    context: dict[str, Any] = dict(
        name=run.name,
        subtitle=f'{len(run.parts)} part(s) of the log: {", ".join(p.name for p in run.parts)}',
        results_of=results_of,
        results=_table('metric', ['value'], {name: [_short(v)] for name, v in metrics.items()}),
        curves={name: _uri(png(draw_curves([run], [name]))) for name in usual_curves([run])},
        classes=None,
        bars=None,
        confusion=None,
        box_rule=dict(score=SCORE_THR, iou=IOU_THR) if of_boxes else None,
        no_confusion=why_not,
        palette={},
        images={},
        no_images=why_not,
        measure=None,
        speed=_table('', ['value'], _speed(run) | _parameters(model)),
        environment=run.environment,
        config=run.config.read_text(encoding='utf-8'),
    )
    if table is not None:
        rows = {name: list(map(_short, values)) for name, values in table.rows.items()}
        context |= dict(
            classes=_table('class', table.columns, rows), bars=_uri(png(draw_classes([run])))
        )
    if confusion is not None:
        context |= dict(
            confusion=_uri(png(draw_confusion(confusion, names))),
            confusions=_table(
                *('truth → prediction', ['% of the class']),
                # Boxes without an object are of no true class.
                _largest_confusions(confusion[: len(names) - of_boxes], names),
            ),
        )
    if collected is not None and collected.measure is not None:
        context |= dict(
            measure=collected.measure,
            images={
                'Worst images': [_embedded(judged) for judged in collected.worst],
                'Best images': [_embedded(judged) for judged in collected.best],
            },
        )
        if collected.measure == MEAN_IOU:
            context['palette'] = {
                name: 'rgb({:d},{:d},{:d})'.format(*map(int, colour))
                for name, colour in zip(collected.classes, collected.palette, strict=False)
            }
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(TEMPLATE).render(context)


def _largest_confusions(confusion: Any, names: list[str], number: int = 10) -> dict[str, list]:
    shares = 100 * confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    np.fill_diagonal(shares, 0)
    order = np.argsort(-shares, axis=None, kind='stable')[:number]
    pairs = [np.unravel_index(i, shares.shape) for i in order]
    return {
        f'{names[row]} → {names[column]}': [_short(shares[row, column])]
        for row, column in pairs
        if shares[row, column] > 0
    }


def _speed(run: RunLog) -> dict[str, list[str]]:
    def values(name: str) -> list[float]:
        return [point.value for point in run.curves.get(name, [])]

    rows: dict[str, list] = {
        'iterations': [max((p.iteration for ps in run.curves.values() for p in ps), default=0)],
        'seconds per training iteration, median': [_median(values('time'))],
        'of which waiting for data, median': [_median(values('data_time'))],
        'seconds per validation batch, median': [_median(values('val/time'))],
        'peak GPU memory, MB': [max(values('memory'), default='not logged')],
    }
    return {name: [str(value) for value in row] for name, row in rows.items()}


def _parameters(model: nn.Module) -> dict[str, list[str]]:
    parts: dict[str, Any] = {
        'parameters, all': model,
        'parameters, backbone': getattr(model, 'backbone', None),
    }
    rows = {
        name: [f'{sum(p.numel() for p in part.parameters()) / 1e6:.2f} M']
        for name, part in parts.items()
        if part is not None
    }
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return rows | {'parameters, trained': [f'{trained / 1e6:.2f} M']}


def _median(values: list[float]) -> str:
    return _short(statistics.median(values)) if values else 'not logged'


def _short(value: float) -> str:
    return f'{value:.4g}'


def _table(first: str, columns: list[str], rows: Mapping[str, list]) -> dict[str, Any]:
    return dict(first=first, columns=columns, rows=rows)


def _embedded(judged: Judged) -> dict[str, Any]:
    return dict(
        path=judged.path,
        name=Path(judged.path).name,
        score=_short(judged.score),
        panels={caption: _jpeg(panel) for caption, panel in judged.panels.items()},
    )


def _jpeg(picture: Any) -> str:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, 'JPEG', quality=88)
    return _uri(buffer.getvalue(), 'jpeg')


def _uri(data: bytes, kind: str = 'png') -> str:
    return f'data:image/{kind};base64,{base64.b64encode(data).decode()}'
