"""What setup.cfg cannot say: the files outside the package that the wheel brings along."""

import shutil
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build

PATTERNS = (
    'README.md',
    'model-index.yml',
    'configs/README.md',
    'configs/**/*.py',
    'configs/**/*.yml',
    'tools/**/*.py',
    'tools/**/*.sh',
)
CHECKOUT_ONLY = Path('tools/bootstrap.py')


class BuildMim(Command):
    """Copy configs, tools and model index to mmnala/.mim, where mim and mmengine look for them.

    A sub-command of ``build`` by setuptools' protocol: the source distribution holds what
    ``get_source_files`` returns.
    """

    description = 'copy configs, tools and the model index into the package'
    user_options = []
    editable_mode = False

    def initialize_options(self):
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options('build_py', ('build_lib', 'build_lib'))

    def get_source_files(self):
        files = {path for pattern in PATTERNS for path in Path().glob(pattern)}
        return sorted(map(str, files - {CHECKOUT_ONLY}))

    def get_output_mapping(self):
        return {f'{self.build_lib}/mmnala/.mim/{file}': file for file in self.get_source_files()}

    def get_outputs(self):
        return list(self.get_output_mapping())

    def run(self):
        if self.editable_mode:
            return
        for target, source in self.get_output_mapping().items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(source, target)


class Build(build):
    """Build anew: what an earlier build left beside it would go into the wheel, too."""

    def run(self):
        shutil.rmtree(Path(self.build_lib, 'mmnala'), ignore_errors=True)
        super().run()


build.sub_commands.append(('build_mim', None))
setup(cmdclass=dict(build=Build, build_mim=BuildMim))
