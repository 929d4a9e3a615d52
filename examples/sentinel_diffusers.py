"""A late recompile of a diffusers pipeline, named with its cause.

    python examples/sentinel_diffusers.py [--backend inductor]

The denoiser of a small random pipeline is compiled and warmed up with one image. More steps of
denoising compile nothing; two images at once do.
"""

from __future__ import annotations

import argparse

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

from graphs import GraphBudgetExceeded, no_compile


def small_pipeline(backend: str) -> DDPMPipeline:
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8,),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    unet.eval().compile(backend=backend, dynamic=False)
    pipeline = DDPMPipeline(unet, DDPMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: DDPMPipeline, images: int, steps: int = 2) -> None:
    pipeline(batch_size=images, num_inference_steps=steps, output_type="np")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="eager", help="of torch.compile")
    pipeline = small_pipeline(parser.parse_args().backend)
    draw(pipeline, images=1)

    with no_compile() as sentinel:
        draw(pipeline, images=1, steps=5)
    print(f"one image, more steps: {sentinel.compiles} compiles")

    try:
        with no_compile():
            draw(pipeline, images=2)
    except GraphBudgetExceeded as error:
        print(f"two images: {error.event}")
        print(f"remedy: {error.event.remedy}")


if __name__ == "__main__":
    main()
