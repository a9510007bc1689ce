"""A hook that draws a training when it ends."""

from pathlib import Path

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner


@HOOKS.register_module(force=True)
class PlotLogHook(Hook):
    """Draw the curves of a training at its end, and the bars of its classes where they are logged.

    ``curves.png``, ``curves.csv``, ``per_class.png`` and ``per_class.csv``, those of
    ``tools/analysis/plot_log.py``, come into the log's folder ``work_dir/TIMESTAMP``; a resumed
    training is drawn from its beginning. Without the scalars that ``LocalVisBackend`` writes there
    is nothing to draw. What goes wrong here is a warning: the training is done by then.
    """

    priority = 'VERY_LOW'  # after everything has been logged

    def after_train(self, runner: Runner) -> None:
        """Draw, in the first process."""
        if runner.rank != 0:
            return
        try:
            # Here, because importing mmnala shall not import matplotlib.
            from ..checkpoint.files import write_new
            from ..report.drawing import run_files, usual_curves
            from ..report.log import read_run

            run = read_run(runner.work_dir)
            folder = Path(runner.log_dir)
            for name, data in run_files([run], usual_curves([run])).items():
                write_new(folder / name, data)
        except Exception as error:
            runner.logger.warning(f'PlotLogHook: nothing drawn: {error}')
        else:
            runner.logger.info(f'PlotLogHook: curves are in {folder}')
