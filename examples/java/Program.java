// Trains an adapter to answer a question, and samples its answer: every kind of call, the details of errors, deadlines
// and cancellation, with grpc-java. With Maven or Gradle, it needs grpc-netty-shaded, grpc-protobuf and grpc-stub of
// io.grpc, and javax.annotation-api. The Makefile builds it with Debian's packages:
//   make
//   TWINKLE_SERVER_URL=127.0.0.1:PORT TWINKLE_API_KEY=tml-... make run
import static java.util.concurrent.TimeUnit.SECONDS;

import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.twinkle.api.data.v1.*;
import com.twinkle.api.model.v1.*;
import com.twinkle.api.sampler.v1.*;
import com.twinkle.api.server.v1.*;
import com.twinkle.api.tensor.v1.*;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.ClientInterceptors;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.stream.Collectors;
import java.util.stream.IntStream;

public final class Program {
  private static final String MODEL = System.getenv().getOrDefault("TWINKLE_MODEL", "smollm2-135m-instruct");
  private static final int STEPS = 12;
  private static final int NO_LABEL = -100;
  // The batch of this program is small; chunks of 1 MiB are recommended.
  private static final int CHUNK_BYTES = 256;

  private final Channel channel;

  private Program(Channel channel) {
    this.channel = channel;
  }

  public static void main(String[] arguments) throws Exception {
    String address = System.getenv("TWINKLE_SERVER_URL").replaceFirst("^\\w+://", "");
    ManagedChannel connection = Grpc.newChannelBuilder(address, credentials()).build();
    Metadata key = new Metadata();
    key.put(
        Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER),
        "Bearer " + System.getenv("TWINKLE_API_KEY"));
    try {
      new Program(ClientInterceptors.intercept(connection, MetadataUtils.newAttachHeadersInterceptor(key))).run();
    } finally {
      connection.shutdownNow();
    }
  }

  /** Returns TLS with the certificate authority of the gateway, or plaintext if no authority is given. */
  private static ChannelCredentials credentials() throws IOException {
    String authority = System.getenv("TWINKLE_CA");
    return authority == null
        ? InsecureChannelCredentials.create()
        : TlsChannelCredentials.newBuilder().trustManager(new File(authority)).build();
  }

  private void run() throws Exception {
    // A call without a deadline would wait for a lost server indefinitely.
    String models =
        ServerServiceGrpc.newBlockingStub(channel)
            .withDeadlineAfter(60, SECONDS)
            .getServerInfo(GetServerInfoRequest.getDefaultInstance())
            .getServicesList()
            .stream()
            .flatMap(service -> service.getBaseModelsList().stream())
            .map(model -> model.getBaseModel())
            .distinct()
            .collect(Collectors.joining(" "));
    System.out.println("models: " + models);

    String adapterId = createAdapter(8);
    Prompt question = chat("Who are you?");
    Batch.Builder batch = Batch.newBuilder().setUploadId(upload(batchOf(question, "I am Twinkle."), adapterId));
    List<Operation.Builder> verbs = new ArrayList<>();
    for (int step = 0; step < STEPS; step++) {
      verbs.add(Operation.newBuilder().setForwardBackward(ForwardBackward.newBuilder().setBatch(batch)));
      verbs.add(Operation.newBuilder().setClipGradAndStep(ClipGradAndStep.newBuilder().setLearningRate(0.005)));
    }
    verbs.add(Operation.newBuilder().setPublishVersion(PublishVersion.getDefaultInstance()));
    List<OperationResult> results = train(adapterId, verbs);
    String losses =
        results.stream()
            .filter(OperationResult::hasForward)
            .map(OperationResult::getForward)
            .map(forward -> String.format(Locale.ROOT, "%.4f", forward.getLoss() / forward.getLabelCount()))
            .collect(Collectors.joining(" "));
    System.out.println("losses: " + losses);

    AdapterRef weights =
        AdapterRef.newBuilder()
            .setAdapterId(adapterId)
            .setExact(results.get(results.size() - 1).getPublish().getVersion())
            .build();
    SamplingParams.Builder params = SamplingParams.newBuilder().setMaxTokens(20).setTemperature(0);
    StringBuilder text = new StringBuilder();
    // An event contains either new tokens or the end of the sequence; the text of the other one is empty.
    sampler()
        .sample(sampleRequest(question, params).setAdapter(weights).build())
        .forEachRemaining(event -> text.append(event.getDelta().getText()).append(event.getFinished().getText()));
    System.out.println("sampled: " + text);

    refuse();
    exceedDeadline();
    cancel(question);
  }

  private SamplerServiceGrpc.SamplerServiceBlockingStub sampler() {
    return SamplerServiceGrpc.newBlockingStub(channel).withDeadlineAfter(60, SECONDS);
  }

  private String createAdapter(int rank) {
    CreateAdapterRequest request =
        CreateAdapterRequest.newBuilder()
            // A repeated request with the same id returns the same adapter.
            .setRequestId(UUID.randomUUID().toString())
            .setBaseModel(MODEL)
            .setLoraConfig(LoraConfig.newBuilder().setLoraRank(rank))
            .build();
    return AdapterServiceGrpc.newBlockingStub(channel)
        .withDeadlineAfter(60, SECONDS)
        .createAdapter(request)
        .getAdapter()
        .getAdapterId();
  }

  /** Returns a batch with one example: the tokens of the question, and those of the answer, which are learned. */
  private FeatureBatch batchOf(Prompt question, String answer) {
    List<Integer> asked = tokensOf(question);
    List<Integer> tokens = new ArrayList<>(asked);
    tokens.addAll(tokensOf(Prompt.newBuilder().setText(answer).build()));
    // Labels are shifted: the label of a position is the next token.
    List<Integer> labels =
        IntStream.rangeClosed(1, tokens.size())
            .mapToObj(next -> next < asked.size() || next == tokens.size() ? NO_LABEL : tokens.get(next))
            .collect(Collectors.toList());
    return FeatureBatch.newBuilder()
        .addFeatures(InputFeature.newBuilder().setInputIds(int32Tensor(tokens)).setLabels(int32Tensor(labels)))
        .build();
  }

  /** Returns the tokens of a prompt as the server converts it; only the first event contains them. */
  private List<Integer> tokensOf(Prompt prompt) {
    SamplingParams.Builder params = SamplingParams.newBuilder().setMaxTokens(0);
    List<Integer> tokens = new ArrayList<>();
    sampler()
        .sample(sampleRequest(prompt, params).build())
        .forEachRemaining(
            event -> {
              ByteString data = event.getPrompt().getTokenIds().getData();
              ByteBuffer elements = data.asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN);
              while (elements.hasRemaining()) {
                tokens.add(elements.getInt());
              }
            });
    return tokens;
  }

  /** Sends a batch in a stream of a header and chunks, and returns the id of the upload. */
  private String upload(FeatureBatch batch, String adapterId) throws Exception {
    ByteString bytes = batch.toByteString();
    BatchHeader.Builder header =
        BatchHeader.newBuilder()
            .setUploadId(UUID.randomUUID().toString())
            .setSizeBytes(bytes.size())
            .setAdapterId(adapterId)
            .setSha256(ByteString.copyFrom(MessageDigest.getInstance("SHA-256").digest(bytes.toByteArray())));
    Responses<UploadBatchResponse> responses = new Responses<>();
    StreamObserver<UploadBatchRequest> requests =
        TrainingServiceGrpc.newStub(channel).withDeadlineAfter(60, SECONDS).uploadBatch(responses);
    requests.onNext(UploadBatchRequest.newBuilder().setHeader(header).build());
    for (int offset = 0; offset < bytes.size(); offset += CHUNK_BYTES) {
      ByteString data = bytes.substring(offset, Math.min(offset + CHUNK_BYTES, bytes.size()));
      TensorChunk.Builder chunk = TensorChunk.newBuilder().setOffset(offset).setData(data);
      requests.onNext(UploadBatchRequest.newBuilder().setChunk(chunk).build());
    }
    requests.onCompleted();
    UploadBatchResponse uploaded = responses.await().get(0);
    System.out.println("uploaded: " + uploaded.getCommittedBytes());
    return uploaded.getUploadId();
  }

  /**
   * Runs operations in one stream, and returns their results. The service runs them in the order of their numbers, so
   * the program need not wait for a result before it sends the next operation.
   */
  private List<OperationResult> train(String adapterId, List<Operation.Builder> verbs) throws Exception {
    Responses<TrainResponse> responses = new Responses<>();
    StreamObserver<TrainRequest> requests =
        TrainingServiceGrpc.newStub(channel).withDeadlineAfter(300, SECONDS).train(responses);
    for (int index = 0; index < verbs.size(); index++) {
      Operation.Builder operation = verbs.get(index).setAdapterId(adapterId).setSequenceNumber(index + 1);
      requests.onNext(TrainRequest.newBuilder().setOperation(operation).build());
    }
    requests.onCompleted();
    List<OperationResult> results = new ArrayList<>();
    for (TrainResponse response : responses.await()) {
      // A failed operation does not end the stream.
      if (response.getResult().hasError()) {
        throw StatusProto.toStatusRuntimeException(response.getResult().getError());
      }
      results.add(response.getResult());
    }
    return results;
  }

  /** Reads why a request was refused from the trailing metadata of the error. */
  private void refuse() throws InvalidProtocolBufferException {
    try {
      createAdapter(-1);
    } catch (StatusRuntimeException refusal) {
      String reason = "";
      String field = "";
      for (Any detail : StatusProto.fromThrowable(refusal).getDetailsList()) {
        if (detail.is(ErrorInfo.class)) {
          reason = detail.unpack(ErrorInfo.class).getReason();
        } else if (detail.is(BadRequest.class)) {
          field = detail.unpack(BadRequest.class).getFieldViolations(0).getField();
        }
      }
      System.out.println("refused: " + reason + " " + field);
    }
  }

  /** Follows the load, which does not end, until the deadline of the call. */
  private void exceedDeadline() {
    try {
      SamplerServiceGrpc.newBlockingStub(channel)
          .withDeadlineAfter(1, SECONDS)
          .watchLoad(WatchLoadRequest.getDefaultInstance())
          .forEachRemaining(response -> {});
    } catch (StatusRuntimeException error) {
      System.out.println("deadline: " + error.getStatus().getCode());
    }
  }

  /** Cancels a stream after its first event. The sampler then ends its sequence. */
  private void cancel(Prompt question) {
    SamplingParams.Builder params = SamplingParams.newBuilder().setIsEosIgnored(true);
    Context.CancellableContext call = Context.current().withCancellation();
    call.run(
        () -> {
          try {
            sampler()
                .sample(sampleRequest(question, params).build())
                .forEachRemaining(event -> call.cancel(null));
          } catch (StatusRuntimeException error) {
            System.out.println("cancelled: " + error.getStatus().getCode());
          }
        });
  }

  private static SampleRequest.Builder sampleRequest(Prompt prompt, SamplingParams.Builder params) {
    return SampleRequest.newBuilder().setBaseModel(MODEL).setPrompt(prompt).setParams(params);
  }

  private static Prompt chat(String question) {
    Message.Builder message =
        Message.newBuilder().setRole(Role.ROLE_USER).addParts(ContentPart.newBuilder().setText(question));
    return Prompt.newBuilder()
        .setChat(ChatPrompt.newBuilder().setTrajectory(Trajectory.newBuilder().addMessages(message)))
        .build();
  }

  private static Tensor int32Tensor(List<Integer> values) {
    ByteBuffer data = ByteBuffer.allocate(Integer.BYTES * values.size()).order(ByteOrder.LITTLE_ENDIAN);
    values.forEach(data::putInt);
    return Tensor.newBuilder()
        .setDtype(Dtype.DTYPE_INT32)
        .addShape(values.size())
        .setData(ByteString.copyFrom(data.array()))
        .build();
  }

  /** Collects the responses of a call, which arrive in other threads. */
  private static final class Responses<T> implements StreamObserver<T> {
    private final List<T> received = new ArrayList<>();
    private final CompletableFuture<List<T>> all = new CompletableFuture<>();

    @Override
    public void onNext(T response) {
      received.add(response);
    }

    @Override
    public void onError(Throwable error) {
      all.completeExceptionally(error);
    }

    @Override
    public void onCompleted() {
      all.complete(received);
    }

    List<T> await() throws Exception {
      return all.get();
    }
  }
}
