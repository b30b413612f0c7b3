"""Every step of planning by itself, what each decides, and the plans one may choose from."""

import torch

import graphfuse
from graphfuse import build_plan_policy, data_type, heur_mode, norm_forward_phase


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(4096, 1024, device=device).to(torch.bfloat16)
    weight = torch.ones(1, 1024, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x)

    graph = graphfuse.pygraph("step_by_step", intermediate_data_type=data_type.FLOAT)
    X, W = graph.tensor_like(x, name="x"), graph.tensor_like(weight, name="weight")
    Y = graph.rmsnorm(X, W, 1e-6, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    Z = graph.swish(Y).set_name("out").set_output().set_data_type(data_type.BFLOAT16)

    print("1. validate: shapes, strides and data types that were not set")
    graph.validate()
    print(f"   {Y.get_name()}: {Y.get_dim()} {Y.get_stride()} {Y.get_data_type().name}")
    print(f"   graph key {graph.key()[:16]}...; the graph as Python:\n")
    print("   | " + str(graph).replace("\n", "\n   | ").rstrip("| \n"))

    print("\n2. build_operation_graph: patterns are matched")
    graph.build_operation_graph()
    print("3. create_execution_plans: engines are asked, in mode A")
    graph.create_execution_plans([heur_mode.A])
    print("4. check_support, 5. build_plans: every plan is compiled, the first is selected")
    graph.check_support()
    graph.build_plans(build_plan_policy.ALL)
    print("\n" + graph.explain())

    print("\n6. execute, with the selected plan and then with each of the others")
    reference = None
    for index in range(graph.get_execution_plan_count()):
        engine, knobs = graph.get_engine_and_knobs_at_index(index)
        size = graph.get_workspace_size_plan_at_index(index)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        graph.execute_plan_at_index({X: x, W: weight, Z: out}, workspace, index)
        reference = out.clone() if reference is None else reference
        same = bool((reference == out).all())
        print(f"   plan {index}: {engine} {knobs}: {'the same bits as plan 0' if same else 'other bits than plan 0'}")

    print("\n7. what a clear no looks like")
    graph.deselect_engines([graph.get_engine_and_knobs_at_index(i)[0] for i in range(graph.get_execution_plan_count())])
    try:
        graph.check_support()
    except graphfuse.GraphNotSupportedError as error:
        print("   " + str(error).replace("\n", "\n   "))


if __name__ == "__main__":
    main()
