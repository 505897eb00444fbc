import pytest

from megatron_grpo.policy.transformer_engine import check_cudnn


def test_a_cudnn_with_wrong_gradients_on_hopper_is_refused_with_what_to_do():
    with pytest.raises(
        ValueError, match=r"cuDNN 9\.14\.0.* 9\.18 is the first.* remove the system"
    ):
        check_cudnn((9, 0), (9, 14, 0))
    check_cudnn((9, 0), (9, 18, 0))
    check_cudnn((10, 0), (9, 14, 0))
