_base_ = './upernet_nala-t_8xb2-160k_ade20k-512x512.py'

# The learning rate falls by this factor from layer to layer, from the head down to the stem. That
# spares what a pre-training has learned, and makes sense only with an init_cfg.
optim_wrapper = dict(
    constructor='LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=0.9),
)
