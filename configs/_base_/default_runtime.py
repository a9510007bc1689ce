custom_imports = dict(imports=['mmnala'], allow_failed_imports=False)

env_cfg = dict(
    cudnn_benchmark=True,
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'),
)
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='SafeCheckpointHook', max_keep_ckpts=2),
    sampler_seed=dict(type='DistSamplerSeedHook'),
)
# The hooks below make a run depend on the seed alone.
randomness = dict(seed=0)
custom_hooks = [
    dict(type='LabelCheckHook'),
    # A run that was interrupted and resumed ends with the same weights as one that was not.
    dict(type='IterationSeedHook'),
    # Each process has batch statistics of its own: average them before they are used or saved.
    dict(type='SyncBuffersHook'),
    # Curves and classes as pictures beside the log, when the training ends.
    dict(type='PlotLogHook'),
    # Faults: an unreadable image, a loss that is not finite, a scheduler that ends the job.
    dict(type='UnreadableImageHook'),
    dict(type='NonFiniteLossHook', action='stop'),
    dict(type='PreemptionHook'),
]
log_level = 'INFO'
load_from = None
resume = False
