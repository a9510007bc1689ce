_base_ = './upernet_nala-t_8xb2-160k_ade20k-512x512.py'

# dtype='bfloat16' works as well.
optim_wrapper = dict(type='AmpOptimWrapper', dtype='float16', loss_scale='dynamic')
