# SPDX-License-Identifier: Apache-2.0
"""What is missing, broken or contradictory on a machine."""

from vllm_flashinfer_vit.machine.remedies import (
    PACKAGES,
    import_remedy,
    missing,
    package_field,
    restore_bindings,
)
from vllm_flashinfer_vit.machine.stack import Problem, Stack
from vllm_flashinfer_vit.machine.versions import (
    TESTED_VLLM,
    check_vllm,
    format_cudnn,
)


def stack_problems(stack: Stack) -> list[Problem]:
    """List what is missing, broken or contradictory in a stack.

    What could not be read in probing, as the driver, is in `Stack.problems` alone.
    """
    problems = []
    for name, package in PACKAGES.items():
        if getattr(stack, name) is None:
            verdict = missing(stack, name)
            problems.append(
                Problem(f"{package} is not installed", verdict.remedy, name == "vllm")
            )
    if stack.vllm is not None and (text := check_vllm(stack.vllm)):
        first, last = TESTED_VLLM
        problems.append(
            Problem(text.rstrip("."), f'pip install "vllm>={first},<={last}"', True)
        )
    for module, error in stack.import_errors.items():
        # A module that is not installed is reported as that already.
        if stack.inspected and getattr(stack, package_field(module)) is not None:
            problems.append(
                Problem(
                    f"importing {module} fails: {error}",
                    import_remedy(stack, module, error),
                )
            )
    problems += _bindings_problems(stack)
    problems += _cudnn_problems(stack)
    if len({gpu.capability for gpu in stack.gpus}) > 1:
        problems.append(
            Problem(
                "the GPUs differ in compute capability; this report is about the first",
                "set CUDA_VISIBLE_DEVICES to GPUs of one kind",
            )
        )
    return problems


def _bindings_problems(stack: Stack) -> list[Problem]:
    if not stack.damaged_bindings:
        return []
    return [
        Problem(
            f"{len(stack.damaged_bindings)} files of cuda-bindings "
            f"{stack.cuda_bindings} are overwritten or missing, the first is "
            f"{stack.damaged_bindings[0]}; cuda-python before 12.8 does that",
            restore_bindings(stack),
            # Only some releases import what an older cuda-python lacks.
            any("cuda.bindings" in error for error in stack.import_errors.values()),
        )
    ]


def _cudnn_problems(stack: Stack) -> list[Problem]:
    problems = []
    if len(stack.cudnn_wheels) > 1:
        names = " and ".join(stack.cudnn_wheels)
        other = next(n for n in stack.cudnn_wheels if n != stack.cudnn_package)
        problems.append(
            Problem(
                f"{names} are both installed, and each overwrites the other's files",
                f"pip uninstall -y {other} && "
                f"pip install --force-reinstall --no-deps {stack.cudnn_package}",
            )
        )
    loaded = format_cudnn(stack.cudnn_backend)
    wheel = stack.cudnn_wheels.get(stack.cudnn_package)
    where = ", ".join(stack.cudnn_libraries) or "an unknown path"
    if stack.cudnn_backend and wheel and not f"{wheel}.".startswith(f"{loaded}."):
        problems.append(
            Problem(
                f"cudnn-frontend loads cuDNN {loaded} from {where}, not "
                f"{stack.cudnn_package} {wheel}",
                "unset LD_LIBRARY_PATH, or take the folder of the other cuDNN out",
            )
        )
    if stack.cudnn_backend and stack.torch_cudnn not in (None, stack.cudnn_backend):
        problems.append(
            Problem(
                f"one process runs two versions of cuDNN: torch "
                f"{format_cudnn(stack.torch_cudnn)}, cudnn-frontend {loaded} ({where})",
                "unset LD_LIBRARY_PATH, or take the folder of the other cuDNN out",
            )
        )
    return problems
